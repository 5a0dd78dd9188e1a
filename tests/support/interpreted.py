"""Triton's kernels on a CPU: the interpreter runs them if this is imported before them.

On a machine with a GPU they are compiled, and the same tests run.
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is made for Linux on x86-64")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
