"""The decoder's small operations in Triton: each reads and writes its rows once, in one launch.

A step of few tokens is otherwise ruled by some fourteen launches a layer. Arithmetic is float32,
rounded where `TorchKernels` rounds (the sum before its norm, a norm before it is rotated, a
product before another is added to it), so what the learner computes with PyTorch's operations is
the same up to float32's last places: a result differs by a few roundings of float32, or, where that
tips a rounding, BY ONE UNIT IN THE LAST PLACE OF ITS OWN DTYPE FOR EACH ROUNDING ON ITS WAY.

A ROW'S BITS DO NOT DEPEND ON ITS BATCH: a program computes one token, or some heads of it, in
blocks that follow from the model's shape, and knows nothing of how many tokens there are.

Inputs are left as they are: a pass that is to be captured is run once before, on the same inputs.
"""

from typing import final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from longtail.model.kernels.gpu import GpuKernels
from longtail.model.kernels.ops import QueryKeyValue, Residual
from longtail.model.rope import Rotation

_PAIRS = 512
"""Pairs that a program rotates: as many heads as fit."""
_BLOCK = 1024
"""Numbers that a program of `swiglu` writes."""


@triton.jit
@no_type_check
def _add_norm(stream, delta, weight, total, normed, eps, HIDDEN: tl.constexpr,
              BLOCK: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """Add and norm one token."""
    row, at = tl.program_id(0).to(tl.int64) * HIDDEN, tl.arange(0, BLOCK)
    inside = at < HIDDEN
    x = tl.load(stream + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(delta + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + row + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
    result = x * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _weighted(x, scale, q_weight, k_weight, at, mask, is_query, like):
    """Half of some normed heads, rounded; queries and keys have a weight each."""
    of_queries, of_keys = tl.load(q_weight + at, mask=mask), tl.load(k_weight + at, mask=mask)
    weight = tl.where(is_query, of_queries, of_keys).to(tl.float32)
    return (x * scale * weight).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
@no_type_check
def _turned(x, other, cos, sin, at, mask, like):
    """x cos + other sin of half of some heads, the first product rounded."""
    c, s = tl.load(cos + at, mask=mask), tl.load(sin + at, mask=mask)
    turned = (x * c.to(tl.float32)).to(like.dtype.element_ty).to(tl.float32)
    return (turned + other * s.to(tl.float32)).to(like.dtype.element_ty)


@triton.jit
@no_type_check
def _rotate(qkv, q_weight, k_weight, cos, sin, out, eps, QUERIES: tl.constexpr,
            ROTATED: tl.constexpr, ALL: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
            WIDTH: tl.constexpr, NORM: tl.constexpr):  # fmt: skip
    """Norm and rotate some heads of one token, queries first, then keys."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    # As wide as the heads at once: threads then read of an angle or a weight what is theirs.
    at = tl.broadcast_to(tl.arange(0, WIDTH)[None, :], [HEADS, WIDTH])
    mask, place = (head < ROTATED) & (at < HALF), head * (2 * HALF) + at
    heads, angle = qkv + token * ALL * (2 * HALF) + place, token * (2 * HALF) + at
    low = tl.load(heads, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(heads + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(low * low + high * high, 1, keep_dims=True)
        scale, is_query = tl.rsqrt(squares / (2 * HALF) + eps), head < QUERIES
        low = _weighted(low, scale, q_weight, k_weight, at, mask, is_query, out)
        high = _weighted(high, scale, q_weight, k_weight, at + HALF, mask, is_query, out)
    to = out + token * ROTATED * (2 * HALF) + place
    tl.store(to, _turned(low, high, cos, sin, angle, mask, out), mask=mask)
    tl.store(to + HALF, _turned(high, low, cos, sin, angle + HALF, mask, out), mask=mask)


@triton.jit
@no_type_check
def _swiglu(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of one block of one token."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, start = at < INNER, gate_up + row * (2 * INNER)
    gate = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + INNER + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * INNER + at, (silu * up).to(out.dtype.element_ty), mask=inside)


@final
class TritonKernels(GpuKernels):
    """float32, bfloat16 and float16, no gradients; rows lie end to end in whole tensors."""

    def add_norm(
        self,
        stream: Float[Tensor, "tokens hidden"],
        delta: Float[Tensor, "tokens hidden"] | None,
        weight: Float[Tensor, "hidden"],
        eps: float,
    ) -> Residual:
        """A program a token; its row stays in registers between sum and norm."""
        pending = stream if delta is None else delta
        _check_dense(stream, pending)
        tokens, hidden = stream.shape
        total = stream if delta is None else torch.empty_like(stream)
        normed, block = torch.empty_like(stream), triton.next_power_of_2(hidden)
        _add_norm[tokens,](
            stream, pending, weight, total, normed, eps, hidden, block, delta is not None,
            num_warps=_warps(block),
        )  # fmt: skip
        return Residual(total, normed)

    def rotate(
        self,
        qkv: Float[Tensor, "tokens all_heads head_dim"],
        num_heads: int,
        q_weight: Float[Tensor, "head_dim"] | None,
        k_weight: Float[Tensor, "head_dim"] | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Queries and keys are written side by side; values stay where they are."""
        cos, sin = rotation.cos, rotation.sin
        tokens, all_heads, dim = qkv.shape
        assert cos.shape == sin.shape == (tokens, 1, dim), "every token has its angles"
        _check_dense(qkv, cos, sin)
        kv_heads = (all_heads - num_heads) // 2
        rotated = num_heads + kv_heads
        out, width = qkv.new_empty(tokens, rotated, dim), triton.next_power_of_2(dim // 2)
        heads = min(max(1, _PAIRS // width), triton.next_power_of_2(rotated))
        norm = q_weight is not None and k_weight is not None
        weights = (q_weight, k_weight) if norm else (cos, cos)
        _rotate[tokens, triton.cdiv(rotated, heads)](
            qkv, *weights, cos, sin, out, eps, num_heads, rotated, all_heads, dim // 2, heads,
            width, norm, num_warps=_warps(heads * width),
        )  # fmt: skip
        return QueryKeyValue(out[:, :num_heads], out[:, num_heads:], qkv[:, rotated:])

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """Blocks of a token are programs of their own."""
        _check_dense(gate_up)
        tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, inner)
        _swiglu[tokens, triton.cdiv(inner, _BLOCK)](
            gate_up, out, inner, _BLOCK, num_warps=_warps(_BLOCK)
        )
        return out


def _check_dense(*tensors: Tensor) -> None:
    assert all(each.is_contiguous() for each in tensors), "rows lie end to end"


def _warps(block: int) -> int:
    """Return how many warps share a block: eight numbers a thread, 16 bytes of bfloat16."""
    return min(max(1, block // 256), 16)
