"""Metrics by step, kept in columns while metrics.jsonl grows, and their bounded extract for a page.

An extract has at most `MOST_POINTS` points whatever the number of steps: neighbouring steps are
joined to one point, in groups of a power of two that begin at fixed rows, so that points do not
move while the run grows.
"""

import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, final

from longtail.run.metrics import is_row, read_line, step_of_line

MOST_BYTES = 32 * 2**20
"""Longest line, and most bytes of the lines of one step."""


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines up to one that is half-written, or longer than any log has."""
    while (line := file.readline(MOST_BYTES)).endswith(b"\n"):
        yield line


def lines_of_step(path: Path, step: int) -> list[bytes]:
    """Return the lines of one step; [] if the file has none or cannot be read."""
    found: list[bytes] = []
    try:
        with path.open("rb") as file:
            file.seek(_first_offset(file, step))
            num_bytes = 0
            for line in whole_lines(file):
                own = step_of_line(line)
                num_bytes += len(line)
                if (own is not None and own > step) or num_bytes > MOST_BYTES:
                    break
                if own == step:
                    found.append(line)
    except OSError:
        return []
    return found


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
        own = step_of_line(file.readline(MOST_BYTES))
        if own is not None and own < step:
            low = file.tell()
        else:
            high = middle
    return low


def short(value: int | float | None) -> float | None:
    """Return a number with 7 significant digits; None for NaN."""
    return None if value is None or value != value else float(f"{value:.7g}")


FILE = "metrics.jsonl"
MOST_POINTS = 400
"""Largest number of points of an extract."""
PHASES = ("rollout", "reward", "learn", "publish", "drafter")
"""Parts of a step; `other` is the rest of it."""
HELD_OUT, VERSION = "eval/reward_mean", "drafter/version"

_Joined = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


_MEANS = (
    "reward/mean", "response_length/p50", "response_length/p90", "response_length/p99",
    "rollout/tokens_per_s", "speculation/accept_length", "drafter/expected_accept_length",
    "cluster/idle_s", "cluster/spot_s", "cluster/learning_ahead_s", "cluster/idle_utilization",
    "timing_s/step", *(f"timing_s/{phase}" for phase in PHASES),
)  # fmt: skip
_JOINS: dict[str, _Joined] = {
    **dict.fromkeys(_MEANS, _mean),
    "response_length/max": max,
    VERSION: max,
}
"""Metrics of the page, each with the function that joins neighbouring steps."""


@final
class MetricSeries:
    """The page's metrics of all steps of a run; `update` reads what was appended."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._clear()

    def _clear(self, inode: int | None = None) -> None:
        self._inode, self._offset = inode, 0
        self.steps = array("q")
        self._columns = {name: array("d") for name in (*_JOINS, HELD_OUT)}

    def update(self) -> None:
        """Read the lines appended since the last call, or all of a file that was replaced."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._clear(status.st_ino)
                file.seek(self._offset)
                for line in whole_lines(file):
                    self._offset += len(line)
                    if (row := read_line(line, is_row)) is not None:
                        self._add(row)
        except OSError:  # removed, or replaced at this moment
            self._clear()

    def _add(self, row: Mapping[str, Any]) -> None:
        """Add the row of a later step."""
        self.steps.append(row["step"])
        for name, column in self._columns.items():
            value = row.get(name)
            column.append(math.nan if value is None else value)

    def extract(self, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Return the steps from `first` to `last`, by default all, as JSON values.

        `columns` holds lists with one value for each point, None where no step has one.
        """
        low = 0 if first is None else bisect_left(self.steps, first)
        high = len(self.steps) if last is None else bisect_right(self.steps, last)
        stride = 1
        while (high - low) / stride > MOST_POINTS - 1:
            stride *= 2
        begins = range(low - low % stride, high, stride)
        groups = [slice(begin, min(begin + stride, high)) for begin in begins]
        columns: dict[str, list[Any]] = {
            "step": [self.steps[group.stop - 1] for group in groups],
            **{name: self._joined(name, groups, join) for name, join in _JOINS.items()},
        }
        columns["timing_s/other"] = _rest(columns)
        return {
            "first": self.steps[0] if self.steps else None,
            "last": self.steps[-1] if self.steps else None,
            "num_steps": len(self.steps),
            "stride": stride,
            "columns": columns,
            "held_out": self._held_out(low, high),
            "versions": self._versions(low, high),
        }

    def _joined(self, name: str, groups: Sequence[slice], join: _Joined) -> list[Any]:
        column = self._columns[name]
        known = ([value for value in column[group] if not math.isnan(value)] for group in groups)
        return [short(join(values) if values else math.nan) for values in known]

    def _held_out(self, low: int, high: int) -> list[list[Any]]:
        """Return held-out rewards by the number of steps before; the row after holds one."""
        column = self._columns[HELD_OUT]
        known = [row for row in range(low, high) if not math.isnan(column[row])]
        thinned = known[:: max(math.ceil(len(known) / MOST_POINTS), 1)]
        return [[self.steps[row] - 1, short(column[row])] for row in thinned]

    def _versions(self, low: int, high: int) -> list[list[Any]]:
        """Return the steps at which workers began to serve another drafter, with its version."""
        column = self._columns[VERSION]
        changes = [
            [self.steps[row], short(column[row])]
            for row in range(max(low, 1), high)
            if column[row] > column[row - 1]
        ]
        return changes[:: max(math.ceil(len(changes) / MOST_POINTS), 1)]


def _rest(columns: dict[str, list[Any]]) -> list[float | int | None]:
    """Return the seconds of each step outside the named phases; workers learn in parallel."""
    parts = zip(*(columns[f"timing_s/{phase}"] for phase in PHASES), strict=True)
    wholes = columns["timing_s/step"]
    return [
        None if whole is None else short(max(whole - sum(s or 0.0 for s in seconds), 0.0))
        for whole, seconds in zip(wholes, parts, strict=True)
    ]
