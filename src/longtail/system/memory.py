"""Memory of tensors: huge pages for weights that every step reads, and tensors parked in a file.

    chunk   |qkv|output|gate_up  |down |qkv|output| ...      16 MiB, whole huge pages

In pages of 4 KiB a model of 270 MB takes 66,000 address translations a step, and the processor's
prefetcher stops at the end of each page. Where the system has no huge pages, memory is ordinary.

    write(tensors, path)    copies their bytes into one file, synced
    release(tensors)        frees their memory; the tensors stay the same objects, without content
    read(tensors, path)     gives them memory again, with the bytes of the file

The file has no header: read it into the tensors that it was written from, in the same order, or
into those of a replica. No view of a parked tensor may exist, which would keep its memory.
"""

import contextlib
import ctypes
import math
import mmap
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 8 * _PAGE
_LINE = 64
"""Bytes of a cache line; every tensor starts at one."""


@final
class HugePages:
    """Hands out dense tensors side by side; a chunk is freed with the last tensor in it."""

    def __init__(self) -> None:
        self._free: Tensor | None = None
        """The rest of the last chunk, in bytes."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU without content."""
        if sys.platform != "linux":
            return torch.empty(shape, dtype=dtype)
        size = math.prod(shape) * dtype.itemsize
        filled = size + -size % _LINE
        if self._free is None or len(self._free) < filled:
            self._free = _mapped(max(filled, _CHUNK))
        own, self._free = self._free[:size], self._free[filled:]
        return own.view(dtype).view(shape)


def _mapped(size: int) -> Tensor:
    """Return bytes that start at a huge page; a page takes memory once it is written."""
    size += -size % _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % _PAGE
    return found[start : start + size]


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
