"""Gradients as whole numbers, so that their sum has the same bits in any order.

    gradient                0.3 = 329853488333 x 2^-40 - 0.2 x 2^-40
    first number, int64     329853488333
    second number           the remainder in steps of 2^-80; for float64 alone

float32 gradients have one number, which the C kernels and PyTorch's operations compute alike. Sums
that are not exact are of the gradient's own dtype, in half of the memory.
"""

import torch
from torch import Tensor

from longtail.model.kernels import native

BITS = 40
"""Bits after the binary point of the first number, and of each further one."""
LIMIT = 2.0**22
"""Magnitude from which a gradient is not added; sums below it are far from the end of int64."""
_CHUNK = 2**22


def num_limbs(dtype: torch.dtype) -> int:
    """Return the whole numbers that hold a gradient of a dtype."""
    return 2 if dtype == torch.float64 else 1


def sum_bytes(dtype: torch.dtype, *, exact: bool) -> int:
    """Return the bytes of the sum of one entry of a gradient."""
    return 8 * num_limbs(dtype) if exact else dtype.itemsize


def new_sums(parameter: Tensor, *, exact: bool = True) -> Tensor:
    """Return zeros for the sums of a parameter's gradients: [limbs, size], int64 if exact."""
    limbs, dtype = (num_limbs(parameter.dtype), torch.int64) if exact else (1, parameter.dtype)
    return torch.zeros(limbs, parameter.numel(), dtype=dtype, device=parameter.device)


def add_gradient(sums: Tensor, gradient: Tensor, largest: Tensor) -> None:
    """Add a gradient, rounded to even, and write its largest magnitude: infinity if not finite.

    Entries from LIMIT on are not added to exact sums. `largest`: one float32. Of a sparse gradient
    the rows alone are added.
    """
    if gradient.is_sparse:
        found = gradient.coalesce()
        whole, (rows,) = sums.view(len(sums), *gradient.shape), found.indices()
        part = whole.index_select(1, rows).flatten(1)
        add_gradient(part, found.values(), largest)
        whole.index_copy_(1, rows, part.view(len(sums), *found.values().shape))
        return
    gradient = gradient.contiguous()
    if sums.is_floating_point():
        sums[0].add_(gradient.view(-1))
        most = torch.linalg.vector_norm(gradient, torch.inf)
        largest.copy_(torch.where(most.isfinite(), most, torch.inf))
        return
    functions = native.functions(gradient.dtype) if gradient.device.type == "cpu" else None
    if functions is not None:
        assert sums.is_contiguous(), "kernels read dense tensors"
        threads = torch.get_num_threads()
        functions["add_fixed"](sums, gradient, gradient.numel(), largest, threads)
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


def write_gradient(sums: Tensor, factor: float, gradient: Tensor) -> None:
    """Write sums times a factor to a dense gradient; one rounding in the end."""
    if sums.is_floating_point():
        torch.mul(sums[0], factor, out=gradient.view(-1))
        return
    functions = native.functions(gradient.dtype) if gradient.device.type == "cpu" else None
    if functions is not None:
        assert sums.is_contiguous(), "kernels read dense tensors"
        assert gradient.is_contiguous(), "kernels write dense tensors"
        step, threads = factor * 2.0**-BITS, torch.get_num_threads()
        functions["from_fixed"](sums, gradient, gradient.numel(), step, threads)
        return
    steps = [factor * 2.0 ** (-BITS * (index + 1)) for index in range(len(sums))]
    for out, parts in zip(
        torch.split(gradient.view(-1), _CHUNK), torch.split(sums, _CHUNK, 1), strict=True
    ):
        out.copy_(sum(part.double() * step for part, step in zip(parts, steps, strict=True)))
