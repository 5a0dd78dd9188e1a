"""A linear layer that can pack its weight for fast inference on a CPU.

`pack` makes a packed copy beside the parameter; training does not pack. The product depends on the
machine:

    float32 or bfloat16, a C compiler   product.c; a row's bits are independent of its batch
    anything else                       as for training: oneDNN in float32, else F.linear
"""

from collections.abc import Mapping
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longtail.model.kernels import native
from longtail.model.kernels.training_products import training_product
from longtail.system.huge_pages import HugePages

_TILE = 32
"""Number of outputs that product.c computes together."""
_LAYOUTS: Mapping[native.Layout, tuple[int, int, int]] = {
    "inputs": (1, 32, 1),
    "halves": (1, 32, 1),
    "pairs": (2, 32, 1),
    "tiles": (2, 16, 32),
}
"""Adjacent inputs of an output, outputs of a block, and the number that divides padded inputs."""


@final
class NativeProduct:
    """The product x W^T + bias by product.c, with a weight in its layout."""

    def __init__(self, packed: Tensor, bias: Tensor | None, outputs: int) -> None:
        functions = native.functions(packed.dtype)
        assert functions is not None, "packed for a product that this machine does not have"
        self.packed, self.bias, self.outputs = packed, bias, outputs
        self._product = functions["product"]

    def data_ptr(self) -> int:
        """Return the address of the packed weight."""
        return self.packed.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with dense rows."""
        assert x.is_contiguous(), "product.c reads dense rows"
        out = x.new_empty(x.shape[0], self.outputs)
        operands = x, self.packed, self.bias, out
        self._product(*operands, *x.shape, self.outputs, torch.get_num_threads())
        return out


class Linear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        self.native: NativeProduct | None = None
        """The weight packed for product.c; None if it is not."""
        self.cast: Tensor | None = None
        """The weight in the dtype of autocast, while it does not change; made by `hold_cast`."""

    def hold_cast(self, dtype: torch.dtype | None) -> None:
        """Convert the weight for products under autocast on a CPU; None drops the copy.

        Call it again after the weight changes.
        """
        self.cast = None if dtype is None else self.weight.detach().to(dtype)

    def pack(self, pages: HugePages | None = None) -> None:
        """Pack the weight for inference; call it again after the weight has changed.

        A layer packed before keeps its memory; a new one takes it from `pages`, which the layers of
        a model share.
        """
        weight, bias = self.weight.detach(), None if self.bias is None else self.bias.detach()
        before = None if self.native is None else self.native.packed
        self.native = _native(weight, bias, before, pages)

    def forward(self, x: Float[Tensor, "tokens inputs"]) -> Float[Tensor, "tokens outputs"]:
        """Return y for a flat list of rows."""
        if self.native is not None:
            return self.native(x)
        return training_product(x, self.weight, self.bias, self.cast)


def pack_layers(module: nn.Module) -> None:
    """Pack all linear layers of a module, side by side in huge pages."""
    pages = HugePages()
    for each in module.modules():
        if isinstance(each, Linear):
            each.pack(pages)


@torch.inference_mode()
def _native(
    weight: Tensor, bias: Tensor | None, before: Tensor | None, pages: HugePages | None
) -> NativeProduct | None:
    """Pack for product.c; None if it does not run on this machine."""
    outputs, inputs = weight.shape
    layout = native.layout(weight.dtype) if weight.device.type == "cpu" else None
    if layout is None or (layout == "pairs" and inputs % 2):
        return None
    # [blocks of outputs][inputs / step][outputs of a block][step], padded with 0
    step, block, multiple = _LAYOUTS[layout]
    more_inputs, more_outputs = -inputs % multiple, -outputs % _TILE
    filled = (
        F.pad(weight, (0, more_inputs, 0, more_outputs)) if more_inputs or more_outputs else weight
    )
    steps = filled if step == 1 else filled.view(torch.int32)  # a pair is one element
    if layout == "halves":
        lanes = native.lanes()
        ordered = filled.view(-1, _TILE // (2 * lanes), 2, lanes, inputs).permute(0, 4, 1, 3, 2)
    else:
        ordered = steps.view(-1, block, filled.shape[1] // step).transpose(1, 2)
    size = (filled.numel(),)
    if before is None or before.dtype != weight.dtype or before.shape != size:
        before = (pages or HugePages()).empty(size, weight.dtype)
    before.view(steps.dtype).view(ordered.shape).copy_(ordered)
    return NativeProduct(before, bias, outputs)
