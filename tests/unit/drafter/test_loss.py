"""The soft cross-entropy, its gradient, and the acceptance scores."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.drafter.eagle.loss import DepthReport, Teacher, score_rows

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
def test_the_cross_entropy_and_its_gradient_are_those_of_autograd(
    ids: Tensor | None, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_agreement_and_overlap_count_tokens_outside_the_draft_vocabulary_as_rejected() -> None:
    p = F.linear(SEEN, HEAD).softmax(-1)
    q = torch.zeros(3, ROWS, VOCAB, dtype=torch.float64)
    scored = _scored().detach()
    q[..., IDS] = F.linear(scored, HEAD[IDS]).softmax(-1)
    rows = score_rows(scored, Teacher(hidden=SEEN, head=HEAD, draft_ids=IDS))
    torch.testing.assert_close(rows.overlap, torch.minimum(p, q).sum(-1))
    assert rows.agreement.tolist() == (q.argmax(-1) == p.argmax(-1)).double().tolist()


def test_the_expected_accept_length_multiplies_along_the_path() -> None:
    assert DepthReport().accept_len == 1
    assert DepthReport(overlap=(0.8, 0.5)).accept_len == pytest.approx(1 + 0.8 + 0.4)
