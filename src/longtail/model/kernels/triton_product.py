"""x W^T + b in Triton, for GPUs: a row's bits do not depend on its batch.

cuBLAS selects its kernel, and with it the order of sums, by the number of rows. Here every row is
in a tile of 64 rows, for any batch, and sums run along the inputs in order. The time for few rows
is that of reading the weight, which bounds decoding anyway.
"""

from typing import final, no_type_check

import triton
import triton.language as tl
from torch import Tensor

from longtail.model.kernels.triton_pages import product_type

_ROWS, _DEPTH = 64, 64
_NARROW, _WIDE = 32, 128
"""Outputs of a tile; fewer if wide tiles would be too few to keep a GPU busy."""
_WIDE_FROM = 16_384


@triton.jit
@no_type_check
def _multiply(x, weight, bias, out, rows, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
              BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
              PRODUCT: tl.constexpr):  # fmt: skip
    """Compute one tile of the product; tiles of the same outputs have adjacent programs."""
    blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) // blocks * COLUMNS + tl.arange(0, COLUMNS)
    row_at, column_at = row.to(tl.int64) * INPUTS, column.to(tl.int64) * INPUTS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        at = start + tl.arange(0, DEPTH)
        inside = (at < INPUTS)[None, :]
        a = tl.load(x + row_at[:, None] + at[None, :], mask=(row < rows)[:, None] & inside,
                    other=0.0)  # fmt: skip
        b = tl.load(weight + column_at[:, None] + at[None, :],
                    mask=(column < OUTPUTS)[:, None] & inside, other=0.0)  # fmt: skip
        acc = tl.dot(a.to(PRODUCT), tl.trans(b.to(PRODUCT)), acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    mask = (row < rows)[:, None] & (column < OUTPUTS)[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=mask)


@final
class TritonProduct:
    """The product with one weight, which it keeps a reference to; float32, bfloat16 or float16."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        assert weight.is_contiguous(), "rows of the weight are contiguous"
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product with dense rows."""
        assert x.is_contiguous(), "rows are contiguous"
        (outputs, inputs), rows = self._weight.shape, len(x)
        columns = _WIDE if outputs >= _WIDE_FROM else _NARROW
        out = x.new_empty(rows, outputs)
        bias = self._weight if self._bias is None else self._bias
        grid = (triton.cdiv(rows, _ROWS) * triton.cdiv(outputs, columns),)
        _multiply[grid](
            x, self._weight, bias, out, rows, inputs, outputs, self._bias is not None, _ROWS,
            columns, _DEPTH, product_type(x.dtype), num_warps=4, num_stages=4,
        )  # fmt: skip
        return out
