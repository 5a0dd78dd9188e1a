"""Lines of log files that another process appends to, cuts back or replaces.

`AppendedLines` follows a file. `lines_of` finds the lines of one step without an index: steps
ascend in every log, so the first line is found by bisection of byte offsets.

    offset    0        40       80       120                    lines_of(step 2) reads at 80, then
    line      step 1   step 1   step 2   step 2 (half written)  at 40, and returns the one at 80
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

StepOf = Callable[[bytes], int | None]
"""Step of a line; None for a damaged line."""

_MOST_BYTES = 64 * 2**20
"""Largest number of bytes that one call reads into memory."""
_MARK = 64
"""Number of bytes before the offset that tell whether a file still begins as it was read."""
_BEGINS = re.compile(rb'\{"step": (\d{1,15})[,}]')
_ENDS = re.compile(rb'"step": (\d{1,15})\}\},?\r?\n?$')


def step_of_row(line: bytes) -> int | None:
    """Return the step of a line of a .jsonl log, which begins with it."""
    found = _BEGINS.match(line)
    return None if found is None else int(found[1])


def step_of_event(line: bytes) -> int | None:
    """Return the step of a line of trace.json, which ends with it."""
    found = _ENDS.search(line, max(len(line) - 40, 0))
    return None if found is None else int(found[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
    """Lines that a file gained since the last read.

    Example: Appended(is_new=False, lines=(b'{"step": 7}\\n',))
    """

    is_new: bool
    """Whether the file was replaced or cut back, so that all earlier lines are void."""
    lines: tuple[bytes, ...]


@final
class AppendedLines:
    """Reads the whole lines that were appended to a file since the last call."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._mark = b""

    def read(self) -> Appended:
        """Return the new lines; a half-written line is left for a later call."""
        try:
            with self._path.open("rb") as file:
                is_new = not self._continues(file)
                if is_new:
                    self._offset, self._mark = 0, b""
                    self._inode = os.fstat(file.fileno()).st_ino
                return Appended(is_new=is_new, lines=tuple(self._lines(file)))
        except OSError:  # removed, or replaced at this moment
            had_lines, self._inode, self._offset = self._offset > 0, None, 0
            return Appended(is_new=had_lines, lines=())

    def _continues(self, file: BinaryIO) -> bool:
        """Return whether the file is the one read before, and still holds what was read."""
        status = os.fstat(file.fileno())
        if status.st_ino != self._inode or status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) == self._mark

    def _lines(self, file: BinaryIO) -> list[bytes]:
        found: list[bytes] = []
        while True:
            file.seek(self._offset)
            data = file.read(_MOST_BYTES)
            end = data.rfind(b"\n") + 1
            if not end and len(data) == _MOST_BYTES:
                end = len(data)  # no log has such a line
            if not end:
                return found
            found += data[:end].splitlines(keepends=True)
            self._offset += end
            self._mark = data[max(end - _MARK, 0) : end]


def lines_of(path: Path, step: int, step_of: StepOf) -> list[bytes]:
    """Return the whole lines of one step; [] if the file has none or cannot be read."""
    found: list[bytes] = []
    try:
        with path.open("rb") as file:
            file.seek(_first_offset(file, step, step_of))
            num_bytes = 0
            while (line := file.readline(_MOST_BYTES)) and num_bytes < _MOST_BYTES:
                own = step_of(line) if line.endswith(b"\n") else None
                if own is not None and own > step:
                    break
                if own == step:
                    found.append(line)
                    num_bytes += len(line)
    except OSError:
        return []
    return found


def _first_offset(file: BinaryIO, step: int, step_of: StepOf) -> int:
    """Return the end of the last line of an earlier step, found by bisection.

    Every line that begins before `low` is of an earlier step; none that begins at or after `high`
    is.
    """
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        file.seek(max(middle - 1, 0))
        if middle:
            file.readline(_MOST_BYTES)  # the rest of the line before
        at, own = file.tell(), None
        while own is None and at < high and (line := file.readline(_MOST_BYTES)):
            own, at = step_of(line), at + len(line)
        if own is not None and own < step:
            low = at
        else:
            high = middle
    return low
