"""How `longtail bench engine` shows its cells: a table for people, one object for programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longtail.bench.common.peers import PeerKind
from longtail.bench.common.report import Spread
from longtail.bench.engine.measure import CellResult
from longtail.bench.engine.options import Setting

DISTURBED = 0.95
"""Below this share of its CPU, a turn was not alone on it."""
COLUMNS = ("cell", "contestant", "tokens/s", "step ms", "engine against it")


def title(setting: Setting, cpus: Sequence[int]) -> str:
    """Say what was measured and where."""
    where = f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"
    return (
        f"Rollout engine, {setting.dtype}, {setting.new_tokens} new tokens, threads: "
        f"{setting.threads}, {where}; median (lowest-highest) of {setting.repeats} turns"
    )


def rows(cell: CellResult) -> list[list[str]]:
    """Render one cell in the columns of COLUMNS, a line a contestant; spreads are on the ratios."""
    speed, floor, linear = cell.tokens_per_s, cell.floor_ratio, cell.linear_floor_ratio
    inside = f"bookkeeping {cell.bookkeeping_share.median:.1%} of a step"
    lines = [
        ["engine", f"{speed['engine'].median:,.0f}", f"{cell.step_ms.median:.2f}", inside],
        ["", "", "", f"sampler {cell.sampler_share.median:.1%} of a step"],
    ]
    for kind, ratio in cell.peer_ratios.items():
        lines.append([kind, f"{speed[kind].median:,.0f}", "", f"{_times(ratio)} as fast"])
    lines.append(["floor", "", f"{cell.floor_ms.median:.2f}", f"{_times(floor)} the time"])
    lines.append(
        ["linear floor", "", f"{cell.linear_floor_ms.median:.2f}", f"{_times(linear)} the time"]
    )
    if cell.lowest_cpu_share < DISTURBED:
        lines.append(["NOTE", "", "", f"CPU shared: {cell.lowest_cpu_share:.0%} in a turn"])
        for name, ratio in cell.cpu_ratios.items():
            unit = "the time" if name == "floor" else "as fast"
            lines.append(["by CPU time", "", "", f"{ratio.median:.2f}x {unit} ({name})"])
    names = [f"{cell.model}, {cell.batch}"] + [""] * (len(lines) - 1)
    return [[name, *line] for name, line in zip(names, lines, strict=True)]


def _times(ratio: Spread) -> str:
    """Render a ratio. Example: 2.44x (2.40-2.51)"""
    return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def as_json(
    results: Sequence[CellResult],
    setting: Setting,
    cpus: Sequence[int],
    contestants: Mapping[str, str],
) -> dict[str, Any]:
    """Arrange the figures; ratios by model, then batch, null where a rival was not measured.

    `floor_ratio` is that of the 100M model at batch 32, `bookkeeping_share` the highest at batch
    32, null where those were not measured; `cells` holds them for every model and batch.

    Example: {"generate_ratio": {"small": {"1": 4.1}}, "vllm_cpu_ratio": {"small": {"1": None}},
              "floor_ratio": 1.2, "bookkeeping_share": 0.05, "cells": [...], ...}
    """

    def over(kind: PeerKind) -> Callable[[CellResult], float | None]:
        return lambda cell: cell.peer_ratios[kind].median if kind in cell.peer_ratios else None

    largest = [cell for cell in results if cell.batch == 32]
    floors = [cell.floor_ratio.median for cell in largest if cell.model == "100m"]
    shares = [cell.bookkeeping_share.median for cell in largest]
    return {
        "generate_ratio": _by_cell(results, over("generate")),
        "vllm_cpu_ratio": _by_cell(results, over("vllm")),
        "floor_ratio": floors[0] if floors else None,
        "bookkeeping_share": max(shares, default=None),
        "cells": [asdict(cell) for cell in results],
        "setting": asdict(setting) | {"pinned_cpus": list(cpus)},
        "contestants": dict(contestants),
    }


def _by_cell(
    results: Sequence[CellResult], read: Callable[[CellResult], float | None]
) -> dict[str, dict[str, float | None]]:
    """Arrange one figure of every cell by model, then batch."""
    table: dict[str, dict[str, float | None]] = {}
    for cell in results:
        table.setdefault(cell.model, {})[str(cell.batch)] = read(cell)
    return table
