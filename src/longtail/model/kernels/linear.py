"""A linear layer that can pack its weight for fast inference on a CPU.

The packed copy lives beside the parameter and is made anew by `pack`; training never packs. Which
product is used depends on what the machine has:

    float32, AVX-512 and a C compiler       product.c: a row's bits do not depend on its batch
    bfloat16, AMX or AVX512-BF16, compiler  product.c, the same
    bfloat16, oneDNN with bfloat16          oneDNN, weight in its blocked layout
    a GPU, batch-invariant                  triton_product.py, the same
    anything else                           as when training: oneDNN in float32, else F.linear
"""

from collections.abc import Callable, Mapping
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longtail.model.kernels import native
from longtail.model.kernels.training import training_product

Product = Callable[[Tensor], Tensor]

_TILE = 32
"""product.c takes outputs by so many."""
_LAYOUTS: Mapping[native.Layout, tuple[int, int, int]] = {
    "inputs": (1, 32, 1),
    "pairs": (2, 32, 2),
    "tiles": (2, 16, 32),
}
"""Inputs of an output that lie side by side, outputs of a block, what divides the inputs."""


@final
class NativeProduct:
    """x W^T + bias by product.c, of a weight in its layout."""

    def __init__(
        self, packed: Tensor, bias: Tensor | None, outputs: int, num_filled: int = 0
    ) -> None:
        product = native.product(packed.dtype)
        assert product is not None, "packed for a product that this machine does not have"
        self.packed = packed
        self.num_filled = num_filled
        """Inputs of weight 0 that the layout adds behind the layer's own."""
        self._product, self._outputs = product, outputs
        self._shift = None if bias is None else bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Apply it to dense rows."""
        if self.num_filled:
            x = F.pad(x, (0, self.num_filled))
        assert x.is_contiguous(), "product.c reads dense rows"
        out = x.new_empty(x.shape[0], self._outputs)
        self._product(
            x.data_ptr(), self.packed.data_ptr(), self._shift, out.data_ptr(),
            *x.shape, self._outputs, torch.get_num_threads(),
        )  # fmt: skip
        return out


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self._packed: Product | None = None

    def pack(self, *, batch_invariant: bool = False) -> None:
        """Pack the present weight for inference; call again after the weight changed.

        `batch_invariant` has a GPU multiply so that a row's bits do not depend on its batch, too.
        """
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        self._packed = _native(weight, bias) or _blocked(weight, bias)
        if batch_invariant and weight.device.type == "cuda":
            self._packed = invariant_product(weight, bias)

    @property
    def native(self) -> NativeProduct | None:
        """The present weight as product.c reads it; None if packed otherwise, or padded."""
        packed = self._packed
        return packed if isinstance(packed, NativeProduct) and not packed.num_filled else None

    def forward(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        """Apply the layer to a flat list of rows."""
        if self._packed is not None:
            return self._packed(x)
        return training_product(x, self.weight, self.bias)


def invariant_product(weight: Tensor, bias: Tensor | None) -> Product:
    """Return the product of a GPU in which all rows are summed alike."""
    from longtail.model.kernels.triton_product import TritonProduct

    return TritonProduct(weight, bias)


def _native(weight: Tensor, bias: Tensor | None) -> NativeProduct | None:
    """Pack for product.c, if this machine and this shape can have it."""
    outputs, inputs = weight.shape
    layout = native.layout(weight.dtype) if weight.device.type == "cpu" else None
    if layout is None:
        return None
    # [blocks of outputs][inputs / step][outputs of a block][step], the last 32 filled up with 0
    step, block, divisor = _LAYOUTS[layout]
    more_inputs, more_outputs = -inputs % divisor, -outputs % _TILE
    filled = (
        F.pad(weight, (0, more_inputs, 0, more_outputs)) if more_inputs or more_outputs else weight
    )
    steps = filled if step == 1 else filled.view(torch.int32)  # a pair moves as one
    packed = steps.view(-1, block, filled.shape[1] // step).transpose(1, 2).contiguous()
    return NativeProduct(packed.view(weight.dtype), bias, outputs, more_inputs)


def _blocked(weight: Tensor, bias: Tensor | None) -> Product | None:
    """Pack for oneDNN, where every call would else reorder the weight anew (bfloat16)."""
    usable = (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch._C._has_mkldnn
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    if not usable:
        return None
    with torch.no_grad():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    # Looked up here: the lookup costs as much as a small product.
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: product(x, packed, bias, "none", [], "")
