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

from longtail.model.attention import Attention, PackedAttention
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
from longtail.model.kernels.packed import NativePackedAttention
from longtail.model.rope import Rotation
from longtail.system import machine

Functions = Mapping[str, Callable[..., None]]
ROWS = 128
"""oneDNN products have a multiple of this number of rows, or a smaller power of two."""


def _pointer(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels read dense tensors"
    return tensor.data_ptr()


def _apply(operation: type[torch.autograd.Function], *arguments: Any) -> Any:
    return operation.apply(*arguments)  # type: ignore[no-untyped-call]


def _sum_into(total: Tensor, part: Tensor, *, add: bool) -> None:
    """Add a part to a total, or write it there."""
    functions = native.functions(part.dtype) if total.device.type == "cpu" else None
    if functions is not None and total.dtype == torch.float32:
        functions["accumulate"](
            _pointer(total), _pointer(part), total.numel(), add, torch.get_num_threads()
        )
    elif add:
        total.add_(part)
    else:
        total.copy_(part)


@final
class WeightGradient:
    """The gradient of a weight that is computed in parts, in another dtype.

    Added `direct`ly to `weight.grad` it is read and written once; autograd would convert a copy,
    and add that.
    """

    def __init__(self, weight: Tensor, *, direct: bool) -> None:
        self.is_first = not direct or weight.grad is None
        """Whether parts are written, not added."""
        if direct:
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
            self._total, self.returned = weight.grad, None
        else:
            self._total = self.returned = torch.empty_like(weight)

    def add(self, part: Tensor, rows: slice = slice(None)) -> None:
        """Add the gradient of some rows; the first parts must cover all of them."""
        _sum_into(self._total[rows], part, add=not self.is_first)


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


class _StreamNorm(torch.autograd.Function):
    """`_AddNorm` under autocast: the stream is float32, what is added and the norm bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, f: Functions, stream: Tensor, delta: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        stream = stream.contiguous()
        delta = None if delta is None else delta.contiguous()
        total, normed = torch.empty_like(stream), torch.empty_like(stream, dtype=torch.bfloat16)
        f["stream_norm"](
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
        grad_delta = torch.empty_like(total, dtype=torch.bfloat16) if ctx.has_delta else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32)
        grad_total, grad_normed = grad_total.contiguous(), grad_normed.contiguous()
        ctx.functions["stream_norm_backward"](
            _pointer(total), _pointer(weight), _pointer(grad_total), _pointer(grad_normed),
            _pointer(grad), _pointer(grad_delta), _pointer(grad_weight), *total.shape, ctx.eps,
        )  # fmt: skip
        return None, grad, grad_delta, grad_weight, None


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
            if grad_out.stride()[1:] != (dim, 1):
                grad_out = grad_out.contiguous()
            grad_weight = None if weight is None else torch.zeros(dim, dtype=torch.float32)
            offset = first * dim * qkv.element_size()
            ctx.functions["rotate_backward"](
                qkv.data_ptr() + offset, all_heads * dim, _pointer(weight), _pointer(cos),
                _pointer(sin), grad_out.data_ptr(), grad_out.stride(0), grad.data_ptr() + offset,
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


class _CastProduct(torch.autograd.Function):
    """A product with a copy of the weight in the dtype of autocast, which is made once a step."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor) -> Tensor:
        x = x.to(copy.dtype)
        ctx.save_for_backward(x, copy)
        ctx.weight, ctx.bias_dtype = weight, None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(copy.dtype)
        return _onednn(_padded(x), copy, bias)[: len(x)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, copy = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows, padded = len(grad), _padded(grad)
        if for_weight:
            part = padded.t() @ _padded(x)  # _onednn would copy both
            WeightGradient(ctx.weight, direct=True).add(part)
        return (
            _onednn(padded, copy.t(), None)[:rows] if for_x else None,
            None,
            grad.sum(0, dtype=ctx.bias_dtype) if for_bias else None,
            None,
        )


class _Embedding(torch.autograd.Function):
    """Rows of a weight, whose gradient is added to `weight.grad` without a dense copy of it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return weight.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        weight = ctx.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens, grad)
        return None, None


def embed(weight: Tensor, tokens: Tensor) -> Tensor:
    """Return the rows of `tokens`; the gradient is added to `weight.grad` itself."""
    result: Tensor = _apply(_Embedding, weight, tokens)
    return result


def padded_rows(rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "more_rows columns"]:
    """Pad rows for oneDNN's products on a CPU; others stay as they are."""
    return _padded(rows) if rows.device.type == "cpu" and rows.dtype != torch.float64 else rows


def multiply(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    out: Float[Tensor, "rows outputs"],
) -> None:
    """Write x W^T to `out`, by the fastest library."""
    if x.device.type == "cpu" and x.dtype == torch.float32 and _prefers_onednn():
        out.copy_(_onednn(x, weight, None))
    else:
        torch.mm(x, weight.t(), out=out)


def _padded(rows: Float[Tensor, "rows columns"]) -> Float[Tensor, "more_rows columns"]:
    """Pad rows with zeros, because oneDNN compiles and keeps a kernel per number of rows.

    Example: 16 rows stay 16, 17 become 32, 129 become 256
    """
    few = len(rows) < ROWS
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows) if few else -len(rows) % ROWS
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


def can_hold_casts(device: torch.device) -> bool:
    """Whether products under autocast can use copies of the weights: oneDNN in bfloat16."""
    return (
        device.type == "cpu"
        and torch._C._has_mkldnn
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def training_product(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    copy: Float[Tensor, "outputs inputs"] | None = None,
) -> Float[Tensor, "rows outputs"]:
    """Return x W^T + bias, for float32 rows on a CPU by the fastest library.

    `copy` is the weight in the dtype of autocast; with it the gradient is added to `weight.grad`.
    """
    if copy is not None and len(x) and torch.is_autocast_enabled("cpu"):
        return _apply(_CastProduct, x, weight, bias, copy)
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
        halves = (
            delta is None or delta.dtype == torch.bfloat16
        ) and torch.bfloat16 in self._functions
        if halves and torch.is_autocast_enabled("cpu"):
            functions = self._functions[torch.bfloat16]
            return Residual(*_apply(_StreamNorm, functions, stream, delta, weight, eps))
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

    def attention(self, given: Attention, dtype: torch.dtype) -> Attention:
        """Return native attention for packed sequences in bfloat16."""
        is_native = dtype == torch.bfloat16 and dtype in self._functions
        if is_native and isinstance(given, PackedAttention):
            return NativePackedAttention(given.cu_seqlens)
        return given

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
