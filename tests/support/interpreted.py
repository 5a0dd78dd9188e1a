"""Triton's kernels on a CPU: the interpreter runs them, where this is imported before they are.

On a machine with a GPU that tests may use they are compiled, and the same tests hold them.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux on x86-64")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def multiply_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreted products sum in order, as a GPU's do for every row.

    The interpreter asks NumPy, whose products round a row by its place among the others.
    """
    from triton.runtime import interpreter

    def dot(builder: object, a: object, b: object, d: object, *_: object) -> object:
        product = (a.data[:, :, None] * b.data[None]).astype(d.data.dtype).sum(1)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
