"""Tests that depend on the processor, and products that a processor would emulate."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longtail.system.device import multiplies_bfloat16

needs_bfloat16 = pytest.mark.skipif(
    not multiplies_bfloat16(torch.device("cpu")), reason="needs bfloat16 products in hardware"
)
_PRODUCTS = ("addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "_linear_pointwise")


class HalfProducts(TorchDispatchMode):
    """Records the matrix products of PyTorch with a bfloat16 operand."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name in _PRODUCTS and any(each.dtype == torch.bfloat16 for each in tensors):
            self.found.append(name)
        return func(*args, **(kwargs or {}))
