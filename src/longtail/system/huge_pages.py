"""Memory of tensors: huge pages for weights that every step reads, and reuse of what is freed.

    chunk   |qkv|output|gate_up  |down |qkv|output| ...      16 MiB, whole huge pages

In pages of 4 KiB a model of 270 MB takes 66,000 address translations a step, and the processor's
prefetcher stops at the end of each page. Where the system has no huge pages, memory is ordinary.
"""

import contextlib
import ctypes
import math
import mmap
import platform
import sys
from typing import final

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 8 * _PAGE
_LINE = 64
"""Bytes of a cache line; every tensor starts at one."""
_IS_GLIBC = platform.libc_ver()[0] == "glibc"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""


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


def reuse_freed_memory() -> None:
    """Keep memory that this process frees for its next tensors, until `release_freed_memory`.

    Otherwise glibc returns large blocks, and the system clears every page of the next ones again.
    """
    if _IS_GLIBC:
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 2**31 - 1)
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def release_freed_memory() -> None:
    """Return all free pages to the system."""
    if _IS_GLIBC:
        ctypes.CDLL(None).malloc_trim(0)


def _mapped(size: int) -> Tensor:
    """Return bytes that start at a huge page; a page takes memory once it is written."""
    size += -size % _PAGE
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % _PAGE
    return found[start : start + size]
