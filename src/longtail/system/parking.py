"""Tensors parked in a file: their memory is free until it is taken back.

    write(tensors, path)    copies their bytes into one file, synced
    release(tensors)        frees their memory; the tensors stay the same objects, without content
    read(tensors, path)     gives them memory again, with the bytes of the file

The file has no header: it is read by the tensors that wrote it, in the same order, or by those of a
replica. No view of a parked tensor may exist, which would keep its memory.
"""

import ctypes
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def write(tensors: Iterable[Tensor], path: Path) -> None:
    """Write the bytes of all tensors; on return they are on disk, and no write is pending."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(_bytes(tensor.detach().cpu().contiguous()).data)
        file.flush()
        os.fsync(file.fileno())


def release(tensors: Iterable[Tensor]) -> None:
    """Free the memory of tensors, which keep their shapes, and return it to the system."""
    for tensor in tensors:
        tensor.data = tensor.data.new_zeros(()).expand(tensor.shape)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    # glibc keeps freed memory below its threshold: of a model of 135M parameters more than half.
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def read(tensors: Iterable[Tensor], path: Path) -> None:
    """Fill released tensors from the file."""
    with path.open("rb") as file:
        for tensor in tensors:
            found = torch.empty(tensor.shape, dtype=tensor.dtype)
            size = file.readinto(_bytes(found).data)
            assert size == found.nbytes, f"{path} is shorter than what was parked in it"
            tensor.data = found.to(tensor.device)


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a dense tensor on the CPU, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy()
