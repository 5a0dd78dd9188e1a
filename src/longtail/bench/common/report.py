"""What every benchmark shares: paired timing, spreads, the machine, the card and its JSON line.

A comparison is only as good as its pairing: `paired` interleaves the contestants (A B A B ...), so
that a slow minute of the machine falls on all of them. It knows nothing of what is measured.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch
from rich.console import Console
from rich.table import Table

_WIDE = 110
"""Columns where there is no terminal: a card kept in a file stays in one piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of repeated measurements, with the extremes beside it.

    Example: Spread(median=2.0, low=1.9, high=2.4)
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        assert values, "a spread needs at least one measurement"
        return Spread(median=statistics.median(values), low=min(values), high=max(values))

    def scaled(self, factor: float) -> "Spread":
        """Multiply by a positive factor (a change of unit)."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)

    def text(self, digits: int = 2) -> str:
        """Render as `median (low-high)`."""
        return f"{self.median:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"

    def numbers(self) -> dict[str, float]:
        """Return the three numbers for JSON."""
        return asdict(self)


def paired(
    functions: Mapping[str, Callable[[], float | None]], *, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Run the contestants in turn, A B A B, and return the seconds of each run.

    A function that returns a float has timed itself (set-up excluded); one that returns None is
    timed from outside. The first `warmup` rounds are run and thrown away.

    Example: paired({"a": f, "b": g}, repeats=2, warmup=1) calls f g f g f g and keeps the last
    four: {"a": [0.10, 0.11], "b": [0.21, 0.20]}
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            own = function()
            elapsed = time.perf_counter() - start if own is None else own
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratio taken within each pair of runs, so that drift cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


@final
class CpuClock:
    """Tells how much of its CPU this process has had inside, with one thread."""

    def __init__(self) -> None:
        self._wall = self._own = 0.0
        self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def __exit__(self, *_: object) -> None:
        wall, own = self._began
        self._wall += time.perf_counter() - wall
        self._own += time.process_time() - own

    def share(self) -> float:
        """Below 1: something else ran on it."""
        return self._own / self._wall if self._wall else 1.0


def pin_threads(threads: int) -> int:
    """Limit torch's compute threads in this process (0 keeps them all); return the number."""
    if threads > 0:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def environment() -> dict[str, Any]:
    """Describe what a figure depends on: machine, library versions, threads."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def finish(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    result: Mapping[str, Any],
    *,
    json_only: bool = False,
) -> None:
    """Print the card (a table and the environment), then `result` as one JSON line, last."""
    surroundings = environment()
    if not json_only:
        show(title, columns, rows)
        _console().print(", ".join(f"{key} {value}" for key, value in surroundings.items()))
    print(json.dumps({**result, "environment": surroundings}), flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table of a card; `finish` prints the last."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else _WIDE)


def _cpu_name() -> str:
    """Name of the processor: from the kernel where it tells, else from the platform module."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
