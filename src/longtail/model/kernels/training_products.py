"""Matrix products for training on a CPU, by MKL or oneDNN, whichever is faster.

PyTorch uses MKL for float32. Where a processor of AMD has AVX-512, of which MKL uses only half of
the vector width, and on ARM, products use oneDNN.
"""

from functools import cache
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.system import machine
from longtail.system.device import multiplies_bfloat16

ROWS = 128
"""oneDNN products have a multiple of this number of rows, or a smaller power of two."""


def apply(operation: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `operation.apply(...)`, whose type torch does not declare."""
    return operation.apply(*arguments)  # type: ignore[no-untyped-call]


@final
class _Product(torch.autograd.Function):
    """A product by oneDNN, with the weight as it is or a copy in the dtype of autocast.

    The gradient of the weight has the copy's dtype, too, if the weight's `grad_dtype` admits that.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, copy: Tensor) -> Tensor:
        x = x.to(copy.dtype)
        ctx.save_for_backward(x, copy)  # x is kept by others, too; a padded copy is not
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(copy.dtype)
        return _onednn(_padded(x), copy, bias)[: len(x)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, copy = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        rows, padded, gradient = len(grad), _padded(grad), None
        if for_weight and copy.dtype == torch.float32:
            gradient = _onednn(padded.t(), _padded(x).t(), None)
        elif for_weight:
            gradient = padded.t() @ _padded(x)  # _onednn would copy both
        return (
            _onednn(padded, copy.t(), None)[:rows] if for_x else None,
            gradient,
            grad.sum(0, dtype=ctx.bias_dtype) if for_bias else None,
            None,
        )


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
    has_avx2_alone = torch.backends.cpu.get_cpu_capability() == "AVX2"
    is_intel = machine.cpu_vendor() == "GenuineIntel"
    return torch._C._has_mkldnn and not (is_intel or has_avx2_alone)


def can_hold_casts(device: torch.device) -> bool:
    """Whether products under autocast can use copies of the weights: oneDNN in bfloat16."""
    return device.type == "cpu" and multiplies_bfloat16(device)


def training_product(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, "outputs"] | None,
    copy: Float[Tensor, "outputs inputs"] | None = None,
) -> Float[Tensor, "rows outputs"]:
    """Return x W^T + bias, for float32 rows on a CPU by the fastest library.

    A bfloat16 weight is widened where a CPU would emulate the product, four times as slowly.
    `copy` is the weight in the dtype of autocast.
    """
    if copy is not None and len(x) and torch.is_autocast_enabled("cpu"):
        return apply(_Product, x, weight, bias, copy)
    is_half = x.device.type == "cpu" and weight.dtype == torch.bfloat16
    if is_half and not multiplies_bfloat16(x.device):
        wide = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide).to(x.dtype)
    if x.device.type != "cpu" or weight.dtype != torch.float32 or not len(x):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("cpu"):  # always oneDNN
        return F.linear(_padded(x), weight, bias)[: len(x)]
    if _prefers_onednn():
        return apply(_Product, x, weight, bias, weight.detach())
    return F.linear(x, weight, bias)
