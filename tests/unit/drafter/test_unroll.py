"""The packed, windowed, unrolled pass; the soft cross-entropy and the acceptance scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.loss import Teacher, score_rows
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.kind import DepthReport
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
def test_recomputed_attention_has_the_same_gradient(window, monkeypatch):
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


def test_the_memory_of_a_window_is_linear_in_the_text():
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
def test_outputs_of_chosen_rows_and_their_gradients_are_those_of_all_rows(window):
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


ROWS, HIDDEN, VOCAB = 7, 6, 11
IDS = torch.tensor([1, 2, 5, 9])


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


HEAD, SEEN = _normal(VOCAB, HIDDEN, seed=1), _normal(ROWS, HIDDEN, seed=2)


def _scored() -> Tensor:
    return _normal(3, ROWS, HIDDEN, seed=3).requires_grad_(True)


def _by_hand(scored: Tensor, ids: Tensor | None) -> Tensor:
    """Compute the cross-entropy with autograd, unchunked."""
    p = F.linear(SEEN, HEAD).softmax(-1)
    head = HEAD
    if ids is not None:
        p, head = p[:, ids] / p[:, ids].sum(-1, keepdim=True), HEAD[ids]
    return -(p * F.linear(scored, head).log_softmax(-1)).sum(-1)


@pytest.mark.parametrize("ids", [None, IDS])
@pytest.mark.parametrize("max_logits", [1, 2 * VOCAB, 10**6])
def test_the_cross_entropy_and_its_gradient_are_those_of_autograd(ids, max_logits, monkeypatch):
    monkeypatch.setattr("longtail.drafter.eagle.loss.MAX_LOGITS", max_logits)
    weights = _normal(3, ROWS, seed=4)
    expected, found = _scored(), _scored()
    teacher = Teacher(hidden=SEEN, head=HEAD, draft_ids=ids)
    rows = score_rows(found, teacher)
    by_hand = _by_hand(expected, ids)
    torch.testing.assert_close(rows.cross_entropy, by_hand)
    torch.autograd.backward((rows.cross_entropy * weights).sum())
    torch.autograd.backward((by_hand * weights).sum())
    torch.testing.assert_close(found.grad, expected.grad)


def test_the_overlap_counts_tokens_outside_the_draft_vocabulary_as_rejected():
    p = F.linear(SEEN, HEAD).softmax(-1)
    q = torch.zeros(3, ROWS, VOCAB, dtype=torch.float64)
    scored = _scored().detach()
    q[..., IDS] = F.linear(scored, HEAD[IDS]).softmax(-1)
    rows = score_rows(scored, Teacher(hidden=SEEN, head=HEAD, draft_ids=IDS))
    torch.testing.assert_close(rows.overlap, torch.minimum(p, q).sum(-1))


def test_the_expected_accept_length_multiplies_along_the_path():
    assert DepthReport().accept_len == 1
    assert DepthReport(overlap=(0.8, 0.5)).accept_len == pytest.approx(1 + 0.8 + 0.4)
