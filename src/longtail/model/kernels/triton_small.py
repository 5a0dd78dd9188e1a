"""The decoder's small operations in Triton: each reads and writes its rows once, in one launch.

With PyTorch's operations some fourteen launches per layer dominate a step of few tokens. Arithmetic
is float32, rounded where `TorchKernels` rounds (the sum before its norm, a norm before its
rotation, a product before another is added). So results equal those of PyTorch's operations, which
the learner uses, up to a few roundings of float32, or, where these change a rounding, UP TO ONE
UNIT IN THE LAST PLACE OF THE RESULT'S DTYPE FOR EACH ROUNDING BEFORE IT.

A ROW'S BITS DO NOT DEPEND ON ITS BATCH: a program computes one token, or some heads of it, in
blocks that depend on the model's shape only.

Inputs are not modified, since a pass runs once before it is captured, on the same inputs.
"""

from typing import final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from longtail.model.kernels.gpu import GpuKernels
from longtail.model.kernels.ops import (
    AllHeads,
    HeadWeight,
    Hidden,
    NormWeight,
    QueryKeyValue,
    Residual,
)
from longtail.model.rope import Rotation

_PAIRS = 512
"""Number of pairs that a program rotates."""
_BLOCK = 1024
"""Number of outputs of a program of `swiglu`."""


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
    """Return half of some normed heads, rounded; queries and keys have different weights."""
    of_queries, of_keys = tl.load(q_weight + at, mask=mask), tl.load(k_weight + at, mask=mask)
    weight = tl.where(is_query, of_queries, of_keys).to(tl.float32)
    return (x * scale * weight).to(like.dtype.element_ty).to(tl.float32)


@triton.jit
@no_type_check
def _turned(x, other, cos, sin, at, mask, like):
    """Return x cos + other sin for half of some heads; the first product is rounded."""
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
    # Broadcast to all heads first, so that each thread loads only its own angles and weights.
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
    """Compute silu(gate) * up for one block of one token."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, start = at < INNER, gate_up + row * (2 * INNER)
    gate = tl.load(start + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + INNER + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * INNER + at, (silu * up).to(out.dtype.element_ty), mask=inside)


@final
class TritonKernels(GpuKernels):
    """Kernels for float32, bfloat16 and float16 without gradients; tensors are contiguous."""

    def add_norm(
        self, stream: Hidden, delta: Hidden | None, weight: NormWeight, eps: float
    ) -> Residual:
        """Add and norm, one program per token; its row stays in registers in between."""
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
        qkv: AllHeads,
        num_heads: int,
        q_weight: HeadWeight | None,
        k_weight: HeadWeight | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Norm and rotate; queries and keys are written to one tensor, values are a view."""
        cos, sin = rotation.cos, rotation.sin
        tokens, all_heads, dim = qkv.shape
        assert cos.shape == sin.shape == (tokens, 1, dim), "every token has its own angles"
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
        """Return silu(first half) * second half, one program per block of a token."""
        _check_dense(gate_up)
        tokens, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, inner)
        _swiglu[tokens, triton.cdiv(inner, _BLOCK)](
            gate_up, out, inner, _BLOCK, num_warps=_warps(_BLOCK)
        )
        return out


def _check_dense(*tensors: Tensor) -> None:
    assert all(each.is_contiguous() for each in tensors), "rows are contiguous"


def _warps(block: int) -> int:
    """Return the warps of a block: eight numbers per thread, 16 bytes of bfloat16."""
    return min(max(1, block // 256), 16)
