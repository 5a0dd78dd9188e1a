"""Supervised learning of completions: the loss, the cut into micro-batches, refusals, resume."""

import pytest
import torch
import torch.nn.functional as F

from longtail.config.sft import SftTrainSection
from longtail.errors import NonFiniteError
from longtail.model.attention import PackedAttention
from longtail.rl.data.examples import Example
from longtail.rl.sft_learner import SftLearner
from support.tiny_models import tiny_model

EXAMPLES = (
    Example(tokens=(5, 6, 7, 8, 1), prompt_len=2),
    Example(tokens=(9, 10, 1), prompt_len=1),
    Example(tokens=(5, 6, 11, 12, 13, 14, 1), prompt_len=4),
)
SETTINGS = SftTrainSection(learning_rate=1e-2, schedule="constant", warmup_steps=0)


def loss_by_hand(model, examples) -> float:
    """Sequence by sequence, every position's cross entropy, prompts left out afterwards."""
    total, count = 0.0, 0
    for example in examples:
        tokens = torch.tensor(example.tokens)
        with torch.no_grad():
            hidden = model(tokens, torch.arange(len(tokens)), PackedAttention((0, len(tokens))))
            losses = F.cross_entropy(model.logits(hidden)[:-1], tokens[1:], reduction="none")
        total += float(losses[example.prompt_len - 1 :].sum())
        count += len(tokens) - example.prompt_len
    return total / count


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_loss_is_the_mean_over_completion_tokens_only():
    model = tiny_model(dtype=torch.float64)
    imitator = SftLearner(model, SETTINGS)
    expected = loss_by_hand(model, EXAMPLES)
    assert imitator.loss(EXAMPLES) == pytest.approx(expected, abs=1e-12)
    metrics = imitator.step(EXAMPLES)
    assert metrics["train/loss"] == pytest.approx(expected, abs=1e-12)
    assert metrics["train/tokens"] == 15


@pytest.mark.parametrize("budget", [1, 8])
def test_how_a_batch_is_cut_does_not_change_the_update(budget):
    models = [tiny_model(dtype=torch.float64) for _ in range(2)]
    for model, tokens in zip(models, (100, budget), strict=True):
        settings = SETTINGS.model_copy(update={"tokens_per_micro_batch": tokens})
        SftLearner(model, settings).step(EXAMPLES)
    expected = weights(models[0])
    for name, value in weights(models[1]).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_a_broken_weight_is_named_and_nothing_is_learned():
    model = tiny_model()
    imitator = SftLearner(model, SETTINGS)
    with torch.no_grad():
        model.layers[1].feed_forward.down.weight[0, 0] = float("nan")
    before = weights(model)["embedding.weight"]
    with pytest.raises(NonFiniteError, match=r"step 0: layers\.1\.feed_forward\.down\.weight"):
        imitator.step(EXAMPLES)
    assert torch.equal(weights(model)["embedding.weight"], before)
    assert all(p.grad is None for p in model.parameters())
