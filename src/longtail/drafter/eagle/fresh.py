"""Fresh EAGLE drafters: initialization from the target, and draft vocabulary."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.types import PackedSequences


def fresh_drafter(
    config: EagleConfig, target: Transformer, sample: PackedSequences, generator: torch.Generator
) -> EagleLayer:
    """Draw a float32 drafter for `target`, scaled by its features of `sample`.

    eagle3 copies the target's final norm, because the frozen head was trained behind that norm. The
    scale matters: if the residual stream is in the tens and the embedding in the tenths, the same
    accuracy was measured to need several times the steps.
    """
    if config.recipe == "eagle3":
        config = replace(config, feature_scale=1 / feature_size(config, target, sample))
    layer = EagleLayer(config)
    layer.initialize(generator)  # on the CPU: the same weights on every device
    layer.to(target.device)
    if config.recipe == "eagle3":
        with torch.no_grad():
            layer.norm.weight.copy_(target.norm.weight)
    return layer


def commonest_tokens(
    sequences: Iterable[Example], size: int, always: Sequence[int] = ()
) -> Int[Tensor, "draft"]:
    """Return the ids of the `size` most frequent completion tokens, `always` included, ascending.

    Ties go to the smaller id; tokens that never occur fill up, smallest id first.

    Example: for completions 7 9 9 and 9 5 the two most frequent tokens are 5 and 9
    """
    counts = Counter[int]()
    for sequence in sequences:
        counts.update(sequence.tokens[sequence.prompt_len :])
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    unseen = (token for token in range(size) if token not in counts)
    chosen = list(dict.fromkeys((*always, *ranked, *unseen)))[:size]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def feature_size(config: EagleConfig, target: Transformer, sample: PackedSequences) -> float:
    """Return the root mean square of the target's features, rounded to be machine-independent."""
    device = target.device
    with torch.no_grad():
        _, features = target.forward_with_features(
            sample.tokens.to(device),
            sample.positions.to(device),
            PackedAttention(sample.cu_seqlens),
            config.taps,
        )
    assert features is not None, "eagle3 taps layers"
    return float(f"{features.float().square().mean().sqrt().item():.2g}")
