"""Native attention within packed sequences is the PyTorch definition, values and gradients."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.model.attention import PackedAttention, SharedAttention, causal_window_mask
from longtail.model.kernels import native
from longtail.model.kernels.packed_attention import NativePackedAttention
from longtail.model.kernels.training_ops import select_training_kernels

pytestmark = pytest.mark.skipif(
    native.functions(torch.float32) is None, reason="needs a C compiler"
)

LENGTHS = st.lists(st.integers(1, 130), min_size=1, max_size=5)


def heads(
    lengths: Sequence[int], groups: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> torch.Tensor:
    """A projection: all queries, keys and values of each token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sum(lengths), (groups + 2) * kv_heads, dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact(qkv: torch.Tensor, lengths: Sequence[int], kv_heads: int, window: int) -> torch.Tensor:
    """The definition in float64, sequence by sequence."""
    parts = []
    for part in qkv.double().split(list(lengths)):
        split = [part.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
        q, k, v = (x.transpose(0, 1) for x in part.split(split, 1))
        mask = causal_window_mask(len(part), len(part), window, qkv.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def ours(qkv: torch.Tensor, lengths: Sequence[int], kv_heads: int, window: int) -> torch.Tensor:
    split = [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads]
    packed = PackedAttention((0, *accumulate(lengths)))
    return NativePackedAttention(packed).attend(0, *qkv.split(split, 1), window)


def both(
    qkv: torch.Tensor, lengths: Sequence[int], kv_heads: int, window: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our values and gradients, each with that of the definition."""
    weights = torch.randn(len(qkv), qkv.shape[1] - 2 * kv_heads, qkv.shape[2]).to(qkv.dtype)
    results = []
    for attend in (ours, exact):
        leaf = qkv.clone().requires_grad_()
        out = attend(leaf, lengths, kv_heads, window)
        (grad,) = torch.autograd.grad((out * weights).sum(), leaf)
        results.append((out.double(), grad.double()))
    return list(zip(*results, strict=True))


@given(
    lengths=LENGTHS,
    groups=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    dim=st.sampled_from([16, 48, 64, 80, 128]),
    window=st.sampled_from([0, 0, 1, 5, 40]),
    seed=st.integers(0, 99),
)
@example(lengths=[48, 49, 1], groups=3, kv_heads=1, dim=64, window=0, seed=0)
@example(lengths=[130], groups=1, kv_heads=1, dim=16, window=33, seed=0)
@settings(max_examples=25, deadline=None)
def test_float32_attention_and_its_gradients(lengths, groups, kv_heads, dim, window, seed):
    qkv = heads(lengths, groups, kv_heads, dim, torch.float32, seed)
    for found, expected in both(qkv, lengths, kv_heads, window):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def test_the_learner_attends_natively_in_bfloat16_only():
    packed = PackedAttention((0, 5, 8))
    kernels = select_training_kernels(torch.float32, torch.device("cpu"))
    assert kernels.attention(packed, torch.float32) is packed
    attention = kernels.attention(packed, torch.bfloat16)
    assert isinstance(attention, NativePackedAttention)
    for dim in (32, 24):  # whole vectors, and not
        qkv = heads((5, 3), 2, 1, dim, torch.bfloat16)
        parts = qkv.split([2, 1, 1], 1)
        found = attention.attend(0, *parts, 0)
        torch.testing.assert_close(found, packed.attend(0, *parts, 0), rtol=0.02, atol=0.02)


def test_sequences_that_share_their_first_tokens_attend_natively_too():
    """Two sequences of 5 and 4 tokens share 3: values and gradients are those of the whole ones."""
    qkv = heads((6,), 2, 1, 32, torch.bfloat16).requires_grad_()
    places, packed = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 5]), PackedAttention((0, 5, 9))
    shared = SharedAttention(whole=packed, places=places)
    kernels = select_training_kernels(torch.float32, torch.device("cpu"))
    native_one = kernels.attention(shared, torch.bfloat16)
    assert isinstance(native_one, SharedAttention)
    assert isinstance(native_one.whole, NativePackedAttention)
    laid = qkv[places].split([2, 1, 1], 1)
    outs = [each.attend(0, *qkv.split([2, 1, 1], 1), 0) for each in (native_one, shared)]
    outs.append(packed.attend(0, *laid, 0)[[0, 1, 2, 3, 4, 8]])
    grads = [torch.autograd.grad(out.float().sin().sum(), qkv)[0] for out in outs]
    for found in (outs, grads):
        for each in found[:2]:
            torch.testing.assert_close(each, found[2], rtol=0.03, atol=0.03)


def test_threads_do_not_change_a_bit():
    lengths = (70, 3, 51, 20)
    qkv = heads(lengths, 3, 2, 32, torch.bfloat16).requires_grad_()
    results, threads = [], torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        out = ours(qkv, lengths, 2, 0)
        (grad,) = torch.autograd.grad(out.float().square().sum(), qkv)
        results.append((out, grad))
    torch.set_num_threads(threads)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
