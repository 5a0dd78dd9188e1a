"""Faster differentiable operations for training on a CPU: fused small operations, and products.

Each small operation is one pass forward and one backward; PyTorch takes about ten, in which a
small model spends a third of its training time. The arithmetic is that of `TorchKernels`
(tests/parity), in float32, and in bfloat16 under autocast. float64, and machines without a
compiler, use `TorchKernels`.

Products use oneDNN unless the processor is Intel's: PyTorch uses MKL for float32, which uses only
half of the vector width on AMD.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.kernels import native
from longtail.model.kernels.ops import (
    AllHeads,
    HeadWeight,
    Hidden,
    Kernels,
    NormWeight,
    QueryKeyValue,
    Residual,
    TorchKernels,
)
from longtail.model.rope import Rotation
from longtail.system import machine

Functions = Mapping[str, Callable[..., None]]
_ROWS = 128
"""oneDNN products have a multiple of this number of rows, or a smaller power of two."""


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read dense tensors"
    return tensor.data_ptr()


def _apply(operation: type[torch.autograd.Function], *arguments: Any) -> Any:
    return operation.apply(*arguments)  # type: ignore[no-untyped-call]


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, f: Functions, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        stream = stream.contiguous()
        delta = None if delta is None else delta.contiguous()
        total, normed = torch.empty_like(stream), torch.empty_like(stream)
        f["add_norm_forward"](
            _pointer(stream), _pointer(delta), _pointer(weight), _pointer(total),
            _pointer(normed), *stream.shape, eps,
        )  # fmt: skip
        ctx.save_for_backward(total, weight)
        ctx.functions, ctx.eps, ctx.has_delta = f, eps, delta is not None
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        grad = torch.empty_like(total)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        grad_total, grad_normed = grad_total.contiguous(), grad_normed.contiguous()
        ctx.functions["add_norm_backward"](
            _pointer(total), _pointer(weight), _pointer(grad_total), _pointer(grad_normed),
            _pointer(grad), _pointer(grad_weight), *total.shape, ctx.eps,
        )  # fmt: skip
        return None, grad, grad if ctx.has_delta else None, grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        f: Functions,
        qkv: Tensor,
        num_heads: int,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv.contiguous()
        tokens, all_heads, dim = qkv.shape
        kv_heads = (all_heads - num_heads) // 2
        rotated = qkv.clone()
        q_weight, k_weight = (
            None if weight is None else weight.to(qkv.dtype) for weight in (q_weight, k_weight)
        )
        f["rotate"](
            _pointer(rotated), _pointer(q_weight), _pointer(k_weight), _pointer(rotation.cos),
            _pointer(rotation.sin), tokens, num_heads, kv_heads, dim, eps,
        )  # fmt: skip
        ctx.save_for_backward(qkv, q_weight, k_weight, rotation.cos, rotation.sin)
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
            grad_out = grad_out.contiguous()
            grad_weight = None if weight is None else torch.zeros(dim, dtype=torch.float32)
            offset = first * dim * qkv.element_size()
            ctx.functions["rotate_backward"](
                qkv.data_ptr() + offset, all_heads * dim, _pointer(weight), _pointer(cos),
                _pointer(sin), _pointer(grad_out), grad.data_ptr() + offset,
                _pointer(grad_weight), tokens, heads, dim, ctx.eps,
            )  # fmt: skip
            grad_weights.append(grad_weight)
            first += heads
        grad[:, first:] = grads[2]
        return None, grad, None, *grad_weights, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Functions, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        f["swiglu"](_pointer(gate_up), _pointer(out), tokens, both // 2)
        ctx.save_for_backward(gate_up)
        ctx.functions = f
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        (gate_up,) = ctx.saved_tensors
        grad = torch.empty_like(gate_up)
        tokens, size = grad_out.shape
        grad_out = grad_out.contiguous()
        ctx.functions["swiglu_backward"](
            _pointer(gate_up), _pointer(grad_out), _pointer(grad), tokens, size
        )
        return None, grad


@final
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # x is kept by others, too; a padded copy is not
        return _onednn(_padded(x), weight, bias)[: len(x)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows, padded = len(grad), _padded(grad)
        return (
            _onednn(padded, weight.t(), None)[:rows] if for_x else None,
            _onednn(padded.t(), _padded(x).t(), None) if for_weight else None,
            grad.sum(0) if for_bias else None,
        )


def _padded(rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "more_rows columns"]:
    """Pad rows with zeros, because oneDNN compiles and keeps a kernel per number of rows.

    Example: 16 rows stay 16, 17 become 32, 129 become 256
    """
    few = len(rows) < _ROWS
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows) if few else -len(rows) % _ROWS
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _onednn(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
) -> Float[Tensor, "rows outputs"]:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@cache
def _prefers_onednn() -> bool:
    return torch._C._has_mkldnn and machine.cpu_vendor() != "GenuineIntel"


def training_product(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
) -> Float[Tensor, "rows outputs"]:
    """Return x W^T + bias, for float32 rows on a CPU by the fastest library."""
    if x.device.type != "cpu" or weight.dtype != torch.float32 or not len(x):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):  # always oneDNN
        return F.linear(_padded(x), weight, bias)[: len(x)]
    return _apply(_Product, x, weight, bias) if _prefers_onednn() else F.linear(x, weight, bias)


class NativeTrainingKernels(TorchKernels):
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
        delta = None if delta is None else delta.to(stream.dtype)
        functions = self._functions[torch.float32]
        return Residual(*_apply(_AddNorm, functions, stream, delta, weight, eps))

    def rotate(
        self,
        qkv: AllHeads,
        num_heads: int,
        q_weight: HeadWeight | None,
        k_weight: HeadWeight | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Norm and rotate in one pass."""
        functions = self._functions[qkv.dtype]
        arguments = (qkv, num_heads, q_weight, k_weight, eps, rotation)
        return QueryKeyValue(*_apply(_Rotate, functions, *arguments))

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """Return silu(first half) * second half, in one pass."""
        return _apply(_SwiGLU, self._functions[gate_up.dtype], gate_up)


def select_training_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    """Return the kernels for training: native for float32 on a CPU with a compiler."""
    if device.type != "cpu" or dtype != torch.float32:
        return TorchKernels()
    computed = (torch.float32, torch.bfloat16)
    functions = {each: found for each in computed if (found := native.functions(each)) is not None}
    return NativeTrainingKernels(functions) if functions else TorchKernels()
