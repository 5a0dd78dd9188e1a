"""A card: tables for people, the machine they were measured on, one JSON object for programs."""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table as RichTable

from longtail.bench.common.timing import Spread
from longtail.system import machine

_WIDTH = 110
"""Columns of a card that is written to a file."""
DISTURBED = 0.95
"""Share of its CPU below which a turn was disturbed by other processes."""


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


def _text(value: object) -> str:
    match value:
        case None:
            return ""
        case Spread():
            return value.text()
        case float():
            return f"{value:,.2f}"
    return str(value)
