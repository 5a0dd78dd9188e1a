"""Faster differentiable small operations for training on a CPU.

Each small operation is one pass forward and one backward; PyTorch takes about ten, in which a
small model spends a third of its training time. The arithmetic is that of `Kernels`
(tests/parity), in float32, and in bfloat16 under autocast. float64, and machines without a
compiler, use `Kernels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.attention import Attention, PackedAttention, SharedAttention
from longtail.model.kernels import native
from longtail.model.kernels.ops import (
    AllHeads,
    HeadNorms,
    Hidden,
    Kernels,
    NormWeight,
    QueryKeyValue,
    Residual,
)
from longtail.model.kernels.packed_attention import NativePackedAttention
from longtail.model.kernels.training_products import apply
from longtail.model.rope import Rotation

Functions = Mapping[str, Callable[..., None]]


class _AddNorm(torch.autograd.Function):
    """Under autocast (`halves`) the stream is float32, what is added and the norm bfloat16."""

    @staticmethod
    def forward(
        ctx: Any,
        f: Functions,
        halves: bool,
        stream: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        stream, weight = stream.contiguous(), weight.contiguous()
        delta = None if delta is None else delta.contiguous()
        total = torch.empty_like(stream)
        normed = torch.empty_like(stream, dtype=torch.bfloat16 if halves else None)
        function = f["stream_norm" if halves else "add_norm_forward"]
        function(stream, delta, weight, total, normed, *stream.shape, eps)
        ctx.save_for_backward(total, weight)
        ctx.functions, ctx.halves, ctx.eps, ctx.has_delta = f, halves, eps, delta is not None
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        grad, f = torch.empty_like(total), ctx.functions
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        given = [total, weight, grad_total.contiguous(), grad_normed.contiguous(), grad]
        grad_delta = grad if ctx.has_delta else None
        if ctx.halves:
            grad_delta = torch.empty_like(total, dtype=torch.bfloat16) if ctx.has_delta else None
            given.append(grad_delta)
        function = f["stream_norm_backward" if ctx.halves else "add_norm_backward"]
        function(*given, grad_weight, *total.shape, ctx.eps)
        return None, None, grad, grad_delta, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        f: Functions,
        qkv: Tensor,
        num_heads: int,
        eps: float,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        tokens, all_heads, dim = qkv.shape
        kv_heads = (all_heads - num_heads) // 2
        rotated = qkv.clone()
        q_weight, k_weight = (
            None if weight is None else weight.to(qkv.dtype) for weight in (q_weight, k_weight)
        )
        angles, sizes = (rotation.cos, rotation.sin), (tokens, num_heads, kv_heads, dim)
        f["rotate"](rotated, q_weight, k_weight, *angles, *sizes, eps)
        ctx.save_for_backward(qkv, q_weight, k_weight, *angles)
        ctx.functions, ctx.eps, ctx.split = f, eps, (num_heads, kv_heads)
        queries, keys, values = torch.split(rotated, [num_heads, kv_heads, kv_heads], 1)
        return queries, keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        tokens, all_heads, dim = qkv.shape
        grad = torch.empty_like(qkv)
        grad_weights: list[Tensor | None] = []
        first = 0
        for weight, grad_out, heads in zip((q_weight, k_weight), grads, ctx.split, strict=False):
            if grad_out.stride()[1:] != (dim, 1):
                grad_out = grad_out.contiguous()
            grad_weight = None if weight is None else torch.zeros(dim, dtype=torch.float32)
            ctx.functions["rotate_backward"](
                qkv[:, first:], all_heads * dim, weight, cos, sin, grad_out, grad_out.stride(0),
                grad[:, first:], grad_weight, tokens, heads, dim, ctx.eps,
            )  # fmt: skip
            grad_weights.append(grad_weight)
            first += heads
        grad[:, first:] = grads[2]
        return None, grad, None, None, *grad_weights, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Functions, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        f["swiglu"](gate_up, out, tokens, both // 2, torch.get_num_threads())
        ctx.save_for_backward(gate_up)
        ctx.functions = f
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (gate_up,) = ctx.saved_tensors
        grad = torch.empty_like(gate_up)
        tokens, size = grad_out.shape
        threads, given = torch.get_num_threads(), (gate_up, grad_out.contiguous())
        ctx.functions["swiglu_backward"](*given, grad, tokens, size, threads)
        return None, grad


class NativeTrainingKernels(Kernels):
    """Fused operations with gradients on a CPU: float32 weights, and bfloat16 under autocast."""

    def __init__(self, functions: Mapping[torch.dtype, Functions]) -> None:
        """`functions` are the kernels of float32 and of autocast's dtype."""
        self._functions = functions

    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, in which the kernels compute."""
        return torch.float32

    def __deepcopy__(self, memo: dict[int, Any]) -> "NativeTrainingKernels":
        """Return this object, which copies of a model share."""
        return self

    def add_norm(
        self, stream: Hidden, delta: Hidden | None, weight: NormWeight, eps: float
    ) -> Residual:
        """Add and norm in one pass. The stream is float32, also under autocast."""
        halves = (
            torch.bfloat16 in self._functions
            and torch.is_autocast_enabled("cpu")
            and (delta is None or delta.dtype == torch.bfloat16)
        )
        functions = self._functions[torch.bfloat16 if halves else torch.float32]
        if delta is not None and not halves:
            delta = delta.to(stream.dtype)
        return Residual(*apply(_AddNorm, functions, halves, stream, delta, weight, eps))

    def rotate(self, qkv: AllHeads, norms: HeadNorms, rotation: Rotation) -> QueryKeyValue:
        """Norm and rotate in one pass."""
        functions = self._functions[qkv.dtype]
        return QueryKeyValue(*apply(_Rotate, functions, qkv, *norms, rotation))

    def attention(self, given: Attention, dtype: torch.dtype) -> Attention:
        """Return native attention for packed sequences in bfloat16."""
        if isinstance(given, SharedAttention):
            return replace(given, whole=self.attention(given.whole, dtype))
        is_native = dtype == torch.bfloat16 and dtype in self._functions
        if is_native and isinstance(given, PackedAttention):
            return NativePackedAttention(given)
        return given

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """Return silu(first half) * second half, in one pass."""
        return apply(_SwiGLU, self._functions[gate_up.dtype], gate_up)


def select_training_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for training: native for float32 on a CPU with a compiler."""
    if device.type != "cpu" or dtype != torch.float32:
        return Kernels()
    computed = (torch.float32, torch.bfloat16)
    functions = {each: found for each in computed if (found := native.functions(each)) is not None}
    return NativeTrainingKernels(functions) if functions else Kernels()
