"""Triton's kernels on a CPU: the interpreter runs them if this is imported before them.

On a machine with a GPU they are compiled, and the same tests run.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux on x86-64")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def multiply_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum interpreted products in order, as a GPU does for every row.

    The interpreter uses NumPy, whose rounding of a row depends on its position in the batch.
    """
    from triton.runtime import interpreter

    def dot(builder: object, a: object, b: object, d: object, *_: object) -> object:
        product = (a.data[:, :, None] * b.data[None]).astype(d.data.dtype).sum(1)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
