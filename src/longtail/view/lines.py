"""Lines of log files that another process appends to, cuts back or replaces.

`AppendedLines` follows a file. `lines_of` finds the lines of one step without an index: steps
ascend in every log, so the first line is found by bisection of byte offsets.

    offset    0        40       80       120                    lines_of(step 2) reads at 80, then
    line      step 1   step 1   step 2   step 2 (half written)  at 40, and returns the one at 80
"""

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, final

StepOf = Callable[[bytes], int | None]
"""Step of a line; None for a damaged line."""

_MOST_BYTES = 32 * 2**20
"""Most bytes that `AppendedLines.read` reads, and most of the lines that `lines_of` returns."""
_MOST_SEARCHED = 8 * _MOST_BYTES
"""Most bytes that `lines_of` reads."""
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


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raises OSError for a device or a pipe, which may have no end."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # a pipe without a writer is opened at once

    file = open(path, "rb", opener=opener)  # noqa: SIM115 - returned
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is no regular file")
    return file


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
        """Return the new lines, of a large file only some; a half-written line is left out.

        A later call returns those that are left.
        """
        try:
            with open_regular(self._path) as file:
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

    @property
    def offset(self) -> int:
        """Number of bytes that were read."""
        return self._offset

    def _lines(self, file: BinaryIO) -> list[bytes]:
        file.seek(self._offset)
        data = file.read(_MOST_BYTES)
        end = data.rfind(b"\n") + 1
        if not end and len(data) == _MOST_BYTES:
            end = len(data)  # no log has such a line
        self._offset += end
        self._mark = data[max(end - _MARK, 0) : end] if end else self._mark
        return data[:end].splitlines(keepends=True)


@final
class _BoundedReader:
    """Reads lines of a file until `_MOST_SEARCHED` bytes were read; then it seems to end."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self._left = file, _MOST_SEARCHED

    def readline(self) -> bytes:
        line = self.file.readline(min(_MOST_BYTES, self._left))
        self._left -= len(line)
        return line


def lines_of(path: Path, step: int, step_of: StepOf) -> list[bytes]:
    """Return the whole lines of one step; [] if the file has none or cannot be read."""
    found: list[bytes] = []
    try:
        with open_regular(path) as file:
            reader = _BoundedReader(file)
            file.seek(_first_offset(reader, step, step_of))
            num_bytes = 0
            while (line := reader.readline()) and num_bytes < _MOST_BYTES:
                own = step_of(line) if line.endswith(b"\n") else None
                if own is not None and own > step:
                    break
                if own == step:
                    found.append(line)
                    num_bytes += len(line)
    except OSError:
        return []
    return found


def _first_offset(reader: _BoundedReader, step: int, step_of: StepOf) -> int:
    """Return the end of the last line of an earlier step, found by bisection.

    Every line that begins before `low` is of an earlier step; none that begins at or after `high`
    is.
    """
    file = reader.file
    low, high = 0, file.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        file.seek(max(middle - 1, 0))
        if middle:
            reader.readline()  # the rest of the line before
        at, own = file.tell(), None
        while own is None and at < high and (line := reader.readline()):
            own, at = step_of(line), at + len(line)
        if own is not None and own < step:
            low = at
        else:
            high = middle
    return low
