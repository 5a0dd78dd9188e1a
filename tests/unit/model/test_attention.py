"""Packed attention against an explicit softmax, one query at a time."""

import itertools

import pytest
import torch
from torch import Tensor

from longtail.model.attention import PackedAttention, causal_window_mask


def by_hand(
    queries: Tensor, keys: Tensor, values: Tensor, starts: list[int], window: int
) -> Tensor:
    """Attend each query alone to its own sequence, up to itself and within the window."""
    out = torch.empty_like(queries)
    share = queries.shape[1] // keys.shape[1]
    for start, end in itertools.pairwise(starts):
        for t in range(start, end):
            first = max(start, t - window + 1) if window else start
            for head in range(queries.shape[1]):
                k, v = keys[first : t + 1, head // share], values[first : t + 1, head // share]
                weights = (k @ queries[t, head] * queries.shape[-1] ** -0.5).softmax(0)
                out[t, head] = weights @ v
    return out


@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize(
    "lengths", [[5], [3, 3, 3], [4, 4, 1, 1, 7], [2, 5, 2], [3, 0, 3]], ids=str
)
def test_every_token_sees_its_own_sequence_up_to_itself(lengths, window):
    generator = torch.Generator().manual_seed(0)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    # As the decoder makes them: one projection, cut into query, key and value heads.
    qkv = torch.randn(starts[-1], 4 + 2 + 2, 8, generator=generator, dtype=torch.float64)
    mine, theirs = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    out = PackedAttention(starts).attend(0, *mine.split([4, 2, 2], 1), window)
    expected = by_hand(*theirs.split([4, 2, 2], 1), starts, window)
    torch.testing.assert_close(out, expected, rtol=0.0, atol=1e-12)
    for each, parameter in ((out, mine), (expected, theirs)):
        each.sin().sum().backward()
        assert parameter.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.0, atol=1e-12)


def test_the_window_mask_equals_the_drawn_one():
    mask = causal_window_mask(num_queries=2, num_keys=4, window=2, device=torch.device("cpu"))
    assert mask.int().tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
