"""Sums over the processes of one machine, in memory that they share: no copy through a socket.

    numbers --> own window | wait | sum of a slice of all windows --> first window | wait | back

A chunk at a time; chunks take turns in two halves of the windows, so that a rank that is
ahead overwrites nothing that another one still reads. A window is a file without a name, which is
gone with the processes that have it open.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

import torch
from torch import Tensor

CHUNK = 2**19
"""Numbers of a chunk: two ranks' windows fit into a cache."""
Gather = Callable[[Sequence[float]], list[list[float]]]
"""Returns the rows of all ranks, by rank."""


@final
class SharedWindows:
    """Windows of all ranks of a group of one machine."""

    def __init__(self, rank: int, windows: Sequence[Tensor]) -> None:
        self._rank, self._windows, self._half = rank, windows, 0

    def add_up(self, numbers: Tensor, wait: Callable[[], None]) -> None:
        """Replace int64 numbers by their sums; `wait` returns once all ranks have called it."""
        size = len(self._windows)
        for chunk in torch.split(numbers.view(-1), CHUNK):
            count = len(chunk)
            windows = [each[self._half, :count] for each in self._windows]
            windows[self._rank].copy_(chunk)
            wait()
            slices = [each.tensor_split(size)[self._rank] for each in windows]
            for other in slices[1:]:
                slices[0].add_(other)
            wait()
            chunk.copy_(windows[0])
            self._half = 1 - self._half


def share_windows(rank: int, gather: Gather) -> SharedWindows | None:
    """Return the windows of all ranks; None, on all of them, if one cannot open another's.

    Every rank calls it. All must be processes of one machine that may open each other's files.
    """
    own = _new_file()
    places = gather([float(os.getpid()), float(own)])
    found: list[Tensor] = []
    with suppress(OSError):
        found = [_opened(int(process), int(file)) for process, file in places]
    have_all = all(row[0] for row in gather([float(bool(found))]))
    if own >= 0:
        os.close(own)
    return SharedWindows(rank, found) if have_all else None


def _new_file() -> int:
    """Return an open file in memory with room for a window; -1 where there is none."""
    if not hasattr(os, "memfd_create"):
        return -1
    try:
        file = os.memfd_create("longtail-sums")
        os.posix_fallocate(file, 0, 2 * CHUNK * 8)  # else a write without memory kills the process
    except OSError:
        return -1
    return file


def _opened(process: int, file: int) -> Tensor:
    opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    try:
        memory = mmap.mmap(opened, 2 * CHUNK * 8)
    finally:
        os.close(opened)
    return torch.frombuffer(memory, dtype=torch.int64).view(2, CHUNK)
