"""Printout of a benchmark: tables, the machine they were measured on, one line of JSON.

    With drafts, longtail generates 2.15x at 1 running, relative to plain decoding.
    TITLE
    | running, contestant | tokens/s | over plain       | ...     a Table, with a Spread in a cell
    | 1, tuned            |      120 | 2.15 (2.08-2.22) |
    cpu ..., cores 2, threads 1, python ..., torch ...
    {"bench": "engine", ..., "environment": {...}}                the last line

`longtail bench e2e` and the scripts in benchmarks/ print it.
"""

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from longtail.system import machine

_WIDTH = 110
"""Columns of a card that is written to a file."""
Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of repeated measurements, with the extremes beside it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        assert values, "a spread needs at least one measurement"
        return Spread(median=statistics.median(values), low=min(values), high=max(values))

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Render as `median (low-high)`."""
        low, high = f"{self.low:,.{digits}f}", f"{self.high:,.{digits}f}"
        return f"{self.median:,.{digits}f}{unit} ({low}-{high})"

    def numbers(self) -> dict[str, float]:
        """Return the three numbers for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts, numbers, spreads, and None for empty cells."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[object]]

    def cells(self) -> list[list[str]]:
        """Return the text of each cell, row by row."""
        return [[_text(cell) for cell in row] for row in self.rows]


def print_card(
    tables: Sequence[Table],
    result: Mapping[str, Any],
    *,
    sentences: Sequence[str] = (),
    json_only: bool = False,
) -> None:
    """Print sentences, tables and the machine, then `result` as one JSON line, last."""
    about = environment()
    if not json_only:
        console = Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
        for sentence in sentences:
            console.print(sentence, markup=False)
        for table in tables:
            shown = RichTable(title=table.title, title_justify="left")
            for index, heading in enumerate(table.headings):
                shown.add_column(heading, justify="left" if index == 0 else "right")
            for row in table.cells():
                shown.add_row(*row)
            console.print(shown)
        console.print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(json.dumps({**result, "environment": about}), flush=True)


def environment() -> dict[str, Any]:
    """Return what a figure depends on: machine, library versions, threads."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return gpu | {
        "cpu": machine.cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def numbers(spreads: Mapping[str, Spread]) -> dict[str, dict[str, float]]:
    """Return median, low and high for JSON."""
    return {name: each.numbers() for name, each in spreads.items()}


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the spread of the ratio taken within each pair of runs, so that drift cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def progress(bench: str) -> Log:
    """Return a function that prints lines of progress to stderr."""
    return lambda text: print(f"bench {bench}: {text}", file=sys.stderr, flush=True)


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case Spread():
            return value.text()
        case float():
            return f"{value:,.2f}"
    return str(value)
