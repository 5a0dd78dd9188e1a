"""Metrics by step, in columns that grow with metrics.jsonl, and the lines of one step of a log."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, final

from longtail.run.metrics_log import is_row, read_line, step_of_line

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
PHASES = ("rollout", "reward", "learn", "publish", "drafter")
"""Parts of a step; `other` is the rest of it."""
_OTHER, _STEP, HELD_OUT = "timing_s/other", "timing_s/step", "eval/reward_mean"
_COLUMNS = (
    "step", "reward/mean", HELD_OUT, "response_length/p50", "response_length/p90",
    "response_length/p99", "response_length/max", "rollout/tokens_per_s",
    "speculation/accept_length", "drafter/expected_accept_length", "cluster/idle_s",
    "cluster/spot_s", "cluster/learning_ahead_s", "cluster/idle_utilization", _STEP,
    *(f"timing_s/{phase}" for phase in PHASES),
)  # fmt: skip
"""Metrics of the page."""


@final
class MetricSeries:
    """The page's metrics of all steps of a run; `update` reads what was appended."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._clear()

    def _clear(self, inode: int | None = None) -> None:
        self._inode, self._offset = inode, 0
        self.columns: dict[str, list[Any]] = {name: [] for name in (*_COLUMNS, _OTHER)}
        """Values by metric, one for each step; None where a step has none."""

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

    def _add(self, row: dict[str, Any]) -> None:
        """Add the row of a later step, and its seconds outside the named phases."""
        if (whole := row.get(_STEP)) is not None:
            named = sum(row.get(f"timing_s/{phase}") or 0.0 for phase in PHASES)
            row[_OTHER] = max(whole - named, 0.0)
        for name, column in self.columns.items():
            column.append(row["step"] if name == "step" else short(row.get(name)))

    def held_out(self) -> list[list[Any]]:
        """Return held-out rewards by the number of steps before; the row after holds one."""
        found = zip(self.columns["step"], self.columns[HELD_OUT], strict=True)
        return [[step - 1, reward] for step, reward in found if reward is not None]
