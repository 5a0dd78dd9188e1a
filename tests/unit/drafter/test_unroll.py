"""The packed, windowed, unrolled pass equals a row-by-row draft."""

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.rl.packing import lay_out
from longtail.types import PackedSequences
from support.eagle_requests import make_layer
from support.tiny_models import tiny_model

STEPS = 4


def _layer(window: int) -> EagleLayer:
    layer = make_layer(tiny_model(dtype=torch.float64), "eagle3", window)
    assert isinstance(layer, EagleLayer)
    return layer


def _packed(lengths: list[int]) -> PackedSequences:
    return lay_out([tuple(range(5, 5 + length)) for length in lengths], [1] * len(lengths))


def _inputs(layer: EagleLayer, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return features and embeddings of each token."""
    generator = torch.Generator().manual_seed(7)
    size = layer.config.feature_size
    features = torch.randn(num_tokens, size, generator=generator, dtype=torch.float64)
    hidden = layer.config.target.hidden_size
    return features, torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("window", [0, 3])
def test_recomputed_attention_has_the_same_gradient(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = _packed([9, 30])
    pairs = Pairs.of(packed)

    def gradient() -> Tensor:
        layer = _layer(window)
        features, embeddings = _inputs(layer, packed.num_tokens)
        given = features[pairs.rows], embeddings[pairs.rows + 1]
        outputs = unroll(layer, *given, pairs, STEPS)
        loss = torch.stack([output.scored for output in outputs]).square().sum()
        torch.autograd.backward(loss)
        assert layer.qkv.weight.grad is not None
        return layer.qkv.weight.grad

    expected = gradient()
    monkeypatch.setattr("longtail.drafter.eagle.unroll.MAX_SCORES", 0)
    torch.testing.assert_close(gradient(), expected)


def test_the_memory_of_a_window_is_linear_in_the_text() -> None:
    """A step has two chunks of scores a row, for every length."""
    layer = _layer(32)
    sizes = []
    for length in (257, 513):
        packed = _packed([length])
        pairs = Pairs.of(packed)
        features, embeddings = _inputs(layer, packed.num_tokens)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes[-1].append(x.numel()) or x, lambda x: x
        ):
            sizes.append([])
            unroll(layer, features[pairs.rows], embeddings[pairs.rows + 1], pairs, 2)
    short, long = (sum(size) for size in sizes)
    assert 1.8 < (long / short) < 2.05


@pytest.mark.parametrize("window", [0, 5])
def test_outputs_of_chosen_rows_and_their_gradients_are_those_of_all_rows(window: int) -> None:
    layer = _layer(window)
    packed = lay_out([tuple(range(5, 25)), tuple(range(6, 20)), (5, 6, 7)], [9, 6, 1])
    given, pairs = _inputs(layer, packed.num_tokens), Pairs.of(packed)
    gradients = []
    for some in (pairs, pairs.for_loss(STEPS)):
        rows = some.chosen
        features = given[0][pairs.rows].requires_grad_(True)
        outputs = unroll(layer, features, given[1][pairs.rows + 1], some, STEPS)
        in_loss = pairs.trained[rows]
        total = features.new_zeros(())
        for step, output in enumerate(outputs):
            chosen = in_loss & pairs.exist(step)[rows]
            total = total + output.scored[chosen].square().sum()
        torch.autograd.backward(total)
        gradients.append((total.detach(), features.grad))
    assert len(rows) < len(pairs.rows)
    torch.testing.assert_close(gradients[0], gradients[1])
