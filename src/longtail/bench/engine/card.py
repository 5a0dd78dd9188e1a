"""The card of `longtail bench engine`."""

from collections.abc import Mapping, Sequence
from typing import Any

from longtail.bench.common.card import DISTURBED, Table, by_position
from longtail.bench.engine.measure import TUNED, Cell
from longtail.bench.options import EngineBenchOptions


def sentences(cells: Sequence[Cell]) -> list[str]:
    """Return what drafting gains at each batch size, and where turns were disturbed."""
    gains = [
        f"{row.over_plain.median:.2f}x at {cell.batch}"
        for cell in cells
        for row in cell.rows
        if row.name == TUNED
    ]
    found = [
        f"With drafts, longtail generates {', '.join(gains)} running, relative to plain decoding."
    ]
    shared = [cell for cell in cells if cell.lowest_cpu_share < DISTURBED]
    for cell in shared:
        share = f"{cell.lowest_cpu_share:.0%}"
        found.append(f"NOTE: other processes ran: a turn at {cell.batch} had {share} of its CPU.")
    return found


def table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a line for each contestant of each cell."""
    rows = [
        (
            f"{cell.batch}, {row.name}",
            f"{row.tokens_per_s.median:,.0f}",
            row.over_plain,
            row.accept_length or None,
            None if row.differing_share is None else f"{row.differing_share:.1%}",
        )
        for cell in cells
        for row in cell.rows
    ]
    headings = ("running, contestant", "tokens/s", "over plain", "accept length", "texts differ")
    return Table(title, by_position(*headings), rows)


def as_json(
    options: EngineBenchOptions, cells: Sequence[Cell], *, dtype: str, peers: Mapping[str, str]
) -> dict[str, Any]:
    """Return every figure."""
    return {
        "bench": "engine",
        "model": options.model,
        "prompts": options.prompts,
        "drafter": options.drafter,
        "dtype": dtype,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "threads": options.threads,
        "peers": dict(peers),
        "cells": [cell.as_json() for cell in cells],
    }
