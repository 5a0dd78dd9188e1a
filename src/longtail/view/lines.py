"""Lines of log files that another process appends to, cuts back or replaces.

`read_step` finds the lines of one step without an index: steps ascend in every log, so the first
line is found by bisection of byte offsets.

    offset    0        40       80       120                    read_step(step 2) reads at 80, then
    line      step 1   step 1   step 2   step 2 (half written)  at 40, and returns the one at 80
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 32 * 2**20
"""Longest line, and most bytes of the lines of one step."""
_BEGINS = re.compile(rb'\{"step": (\d+)[,}]')
_ENDS = re.compile(rb'"step": (\d+)\}\},\n$')


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raises OSError for a device or a pipe, which may have no end."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a pipe without a writer is opened at once

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines up to one that is half-written, or longer than any log has."""
    while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
        yield line


def read_step(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the rows or events of one step; [] if the file has none or cannot be read."""
    found: list[bytes] = []
    try:
        with open_regular(path) as file:
            file.seek(_first_offset(file, step))
            num_bytes = 0
            for line in whole_lines(file):
                own = _step_of(line)
                num_bytes += len(line)
                if (own is not None and own > step) or num_bytes > MOST_BYTES:
                    break
                if own == step:
                    found.append(line)
    except OSError:
        return []
    return [json.loads(line.rstrip(b",\n")) for line in found]


def _step_of(line: bytes) -> int | None:
    """Return the step of a row, which begins with it, or of a trace event, which ends with it."""
    found = _BEGINS.match(line) or _ENDS.search(line, max(len(line) - 40, 0))
    return None if found is None else int(found[1])


def _first_offset(file: BinaryIO, step: int) -> int:
    """Return the end of the last line of an earlier step, found by bisection.

    Every line that begins before `low` is of an earlier step; none that begins at or after `high`
    is.
    """
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        file.seek(max(middle - 1, 0))
        if middle:
            file.readline(MOST_BYTES)  # the rest of the line before
        own = _step_of(file.readline(MOST_BYTES))
        if own is not None and own < step:
            low = file.tell()
        else:
            high = middle
    return low


def short(value: int | float | None) -> float | None:
    """Return a number with 7 significant digits; None for NaN."""
    return None if value is None or value != value else float(f"{value:.7g}")
