"""The card of `longtail bench engine`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longtail.bench.common.card import DISTURBED, Table, by_position
from longtail.bench.common.options import settings
from longtail.bench.common.process import pinned
from longtail.bench.engine.measure import CellResult
from longtail.bench.engine.options import EngineBenchOptions

_HEADINGS = ("model, batch size", "contestant", "tokens/s", "step ms", "compared with longtail")


def table(options: EngineBenchOptions, cpus: Sequence[int], cells: Sequence[CellResult]) -> Table:
    """Return the table, with one line for each contestant of each cell."""
    title = (
        f"Rollout engine, {options.dtype}, {options.new_tokens} new tokens, threads: "
        f"{options.threads}, {pinned(cpus)}; median (lowest-highest) of {options.repeats} turns"
    )
    return Table(title, by_position(*_HEADINGS), [line for cell in cells for line in lines(cell)])


def lines(cell: CellResult) -> Iterator[tuple[str, ...]]:
    """Yield the lines of one cell; spreads are over the ratios of the turns."""
    speed = {name: f"{spread.median:,.0f}" for name, spread in cell.tokens_per_s.items()}
    name = f"{cell.model}, {cell.batch}"
    bookkeeping = f"bookkeeping {cell.bookkeeping_share.median:.1%} of a step"
    yield name, "longtail", speed["engine"], f"{cell.step_ms.median:.2f}", bookkeeping
    yield "", "", "", "", f"sampler {cell.sampler_share.median:.1%} of a step"
    for kind, ratio in cell.peer_ratios.items():
        yield "", kind, speed[kind], "", f"longtail is {ratio.text(unit='x')} as fast"
    for floor, step_ms, ratio in (
        ("matrix products", cell.floor_ms, cell.floor_ratio),
        ("products with weights", cell.linear_floor_ms, cell.linear_floor_ratio),
    ):
        times = f"longtail takes {ratio.text(unit='x')} the time"
        yield "", floor, "", f"{step_ms.median:.2f}", times
    if cell.lowest_cpu_share < DISTURBED:
        yield "", "NOTE", "", "", f"CPU shared: {cell.lowest_cpu_share:.0%} in a turn"
        for name, ratio in cell.cpu_ratios.items():
            unit = "the time" if name == "floor" else "as fast"
            yield "", "by CPU time", "", "", f"{ratio.median:.2f}x {unit} ({name})"


def as_json(
    options: EngineBenchOptions,
    cpus: Sequence[int],
    cells: Sequence[CellResult],
    contestants: Mapping[str, str],
) -> dict[str, Any]:
    """Return the figures; ratios by model, then batch size, None where one was not measured.

    `floor_ratio` is that of the 100M model at batch 32, `bookkeeping_share` the highest at batch
    32.

    Example: {"generate_ratio": {"small": {"1": 4.1}}, "vllm_cpu_ratio": {"small": {"1": None}},
              "floor_ratio": 1.2, "bookkeeping_share": 0.05, "cells": [...], ...}
    """

    def by_cell(read: Callable[[CellResult], float | None]) -> dict[str, dict[str, float | None]]:
        return {
            model: {str(cell.batch): read(cell) for cell in cells if cell.model == model}
            for model in dict.fromkeys(cell.model for cell in cells)
        }

    def over(kind: str) -> Callable[[CellResult], float | None]:
        return lambda cell: cell.peer_ratios[kind].median if kind in cell.peer_ratios else None

    largest = [cell for cell in cells if cell.batch == 32]
    floors = [cell.floor_ratio.median for cell in largest if cell.model == "100m"]
    return {
        "model": options.model,
        "generate_ratio": by_cell(over("generate")),
        "vllm_cpu_ratio": by_cell(over("vllm")),
        "floor_ratio": floors[0] if floors else None,
        "bookkeeping_share": max((cell.bookkeeping_share.median for cell in largest), default=None),
        "cells": [asdict(cell) for cell in cells],
        "setting": settings(options) | {"pinned_cpus": list(cpus)},
        "contestants": dict(contestants),
    }
