"""The start of an EAGLE-1 drafter: a ridge regression of the target's next state."""

from collections.abc import Callable, Iterable

import torch

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.sums import LagSums
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.drafter.training.texts import pack_texts
from longtail.model.transformer import DecoderLayer, Transformer
from longtail.rl.data.examples import Example


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

    `fc` is slot 1 of a ridge drafter without bias. Attention and feed-forward add nothing yet; the
    inner weights of the latter are those of the target's last layer. The target reads `budget`
    tokens at a time, after a call of `check`. Returns the number of trained tokens, of whole texts.
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
    sums, hidden = LagSums(**trainer.tensors()), target.config.hidden_size
    sums.steps[hidden] = 0.0  # the constant: `fc` has no bias
    state, embedding = torch.split(sums.solve()["streams.0.weight"], hidden, 1)
    last, inner = target.layers[-1], layer.feed_forward
    assert isinstance(last, DecoderLayer)
    with torch.no_grad():
        layer.fc.weight.copy_(torch.cat((embedding, state), 1))
        layer.feed_forward_norm.weight.copy_(last.feed_forward_norm.weight)
        inner.gate_up.weight.copy_(last.feed_forward.gate_up.weight)
        for residual in (layer.output, inner.down):
            residual.weight.zero_()
    return count
