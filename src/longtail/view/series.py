"""Metrics by step, kept in columns while metrics.jsonl grows, and their bounded extract for a page.

An extract has at most `MOST_POINTS` points whatever the number of steps: neighbouring steps are
joined to one point, in groups of a power of two that begin at fixed rows, so that points do not
move while the run grows.
"""

import json
import math
import os
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, final

from longtail.view.lines import open_regular, short, whole_lines

FILE = "metrics.jsonl"
MOST_POINTS = 400
"""Largest number of points of an extract."""
PHASES = ("rollout", "reward", "logprob", "update", "publish", "drafter")
"""Parts of a step; `other` is the rest of it."""
HELD_OUT, VERSION = "eval/reward_mean", "drafter/version"

_Joined = Callable[[Sequence[float]], float]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


_MEANS = (
    "reward/mean", "response_length/p50", "response_length/p90", "response_length/p99",
    "rollout/tokens_per_s", "speculation/accept_length", "drafter/expected_accept_length",
    "cluster/idle_s", "cluster/spot_s", "cluster/idle_utilization",
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
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._clear(status.st_ino)
                file.seek(self._offset)
                for line in whole_lines(file):
                    self._offset += len(line)
                    self._add(json.loads(line))
        except OSError:  # removed, or replaced at this moment
            self._clear()

    def _add(self, row: dict[str, Any]) -> None:
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
