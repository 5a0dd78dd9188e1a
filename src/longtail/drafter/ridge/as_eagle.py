"""EAGLE-1 from a regression: the start of its training, and a ridge drafter in its layout."""

from collections.abc import Callable, Iterable

import torch

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.model.transformer import DecoderLayer, Transformer
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_texts


def as_eagle(ridge: RidgeLayer) -> EagleLayer:
    """Return an EAGLE-1 layer that repeats slot 1 at every depth; nothing attends."""
    config = ridge.config
    layer = EagleLayer(
        EagleConfig(
            recipe="eagle1",
            target=config.target,
            window=0,
            draft_vocab_size=config.draft_vocab_size,
        )
    )
    layer.initialize(torch.Generator().manual_seed(0))
    layer.to(ridge.device, ridge.dtype)
    _repeat(layer, ridge)
    return layer


def regress(
    layer: EagleLayer,
    target: Transformer,
    texts: Iterable[Example],
    *,
    num_tokens: int,
    budget: int,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Set a layer to the regression over the first `num_tokens` trained tokens of the texts.

    Attention and feed-forward add nothing yet; the inner weights of the latter are those of the
    target's last layer. The target reads `budget` tokens at a time, after a call of `check`.
    Returns the number of trained tokens, of whole texts.
    """
    assert layer.config.recipe == "eagle1", "only eagle1 predicts the next state"
    chosen, count = [], 0
    for text in texts:
        if count >= num_tokens:
            break
        if (trained := len(text.tokens) - text.prompt_len - 1) > 0:
            chosen.append(text)
            count += trained
    trainer = RidgeTrainer(RidgeLayer(RidgeConfig(target=target.config, slots=1)), target)
    for packed in pack_texts(chosen, budget):
        check()
        trainer.step([packed])
    last = target.layers[-1]
    assert isinstance(last, DecoderLayer)
    with torch.no_grad():
        layer.feed_forward_norm.weight.copy_(last.feed_forward_norm.weight)
        layer.feed_forward.gate_up.weight.copy_(last.feed_forward.gate_up.weight)
    _repeat(layer, trainer.layer)
    return count


@torch.no_grad()
def _repeat(layer: EagleLayer, ridge: RidgeLayer) -> None:
    """Set `fc` to slot 1, and what is added to it to zero."""
    first = dict(ridge.named_parameters())["streams.0.weight"]
    state, embedding = torch.split(first, ridge.config.target.hidden_size, 1)
    layer.fc.weight.copy_(torch.cat((embedding, state), 1))
    for residual in (layer.output, layer.feed_forward.down):
        residual.weight.zero_()
