"""Gradients as whole numbers, so that their sum has the same bits in any order.

    gradient                0.3 = 329853488333 x 2^-40 - 0.2 x 2^-40
    first number, int64     329853488333
    second number           the remainder in steps of 2^-80; for float64 alone

float32 gradients have one number, which the C kernels and PyTorch's operations compute alike.
"""

import torch
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.products import pointer

BITS = 40
"""Bits after the binary point of the first number, and of each further one."""
LIMIT = 2.0**22
"""Magnitude from which a gradient is not added; sums below it are far from the end of int64."""
_CHUNK = 2**22


def num_limbs(dtype: torch.dtype) -> int:
    """Return the whole numbers that hold a gradient of a dtype."""
    return 2 if dtype == torch.float64 else 1


def new_sums(parameter: Tensor) -> Tensor:
    """Return zeros for the sums of a parameter's gradients: [limbs, size], int64."""
    size = (num_limbs(parameter.dtype), parameter.numel())
    return torch.zeros(size, dtype=torch.int64, device=parameter.device)


def add_fixed(sums: Tensor, gradient: Tensor, largest: Tensor) -> None:
    """Add a gradient, rounded to even, and write its largest magnitude: infinity if not finite.

    Entries from LIMIT on are not added. `largest`: one float32.
    """
    gradient = gradient.contiguous()
    functions = native.functions(gradient.dtype) if gradient.device.type == "cpu" else None
    if functions is not None:
        size, threads = gradient.numel(), torch.get_num_threads()
        functions["add_fixed"](pointer(sums), pointer(gradient), size, pointer(largest), threads)
        return
    largest.zero_()
    pieces = torch.split(gradient.view(-1), _CHUNK)
    for totals, piece in zip(torch.split(sums, _CHUNK, 1), pieces, strict=True):
        most = torch.linalg.vector_norm(piece, torch.inf).float()
        largest.copy_(torch.where(most.isfinite(), torch.maximum(most, largest), torch.inf))
        rest = torch.where(piece.abs() < LIMIT, piece, 0.0).double() * 2.0**BITS
        for total in totals:
            whole = rest.round()
            total.add_(whole.long())
            rest = (rest - whole) * 2.0**BITS


def from_fixed(sums: Tensor, factor: float, gradient: Tensor) -> None:
    """Write sums times a factor to a dense gradient; one rounding in the end."""
    functions = native.functions(gradient.dtype) if gradient.device.type == "cpu" else None
    if functions is not None:
        size, threads = gradient.numel(), torch.get_num_threads()
        step = factor * 2.0**-BITS
        functions["from_fixed"](pointer(sums), pointer(gradient), size, step, threads)
        return
    steps = [factor * 2.0 ** (-BITS * (index + 1)) for index in range(len(sums))]
    for out, parts in zip(
        torch.split(gradient.view(-1), _CHUNK), torch.split(sums, _CHUNK, 1), strict=True
    ):
        out.copy_(sum(part.double() * step for part, step in zip(parts, steps, strict=True)))
