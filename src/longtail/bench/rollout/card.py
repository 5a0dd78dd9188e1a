"""The card of `longtail bench rollout`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from longtail.bench.common.card import Table, by_position
from longtail.bench.common.options import settings
from longtail.bench.common.process import pinned
from longtail.bench.rollout.coupling import Coupling
from longtail.bench.rollout.measure import CellResult, Contest, describe
from longtail.bench.rollout.options import RolloutBenchOptions


@dataclass(slots=True, kw_only=True)
class RolloutResults:
    """All figures of the benchmark."""

    cells: list[CellResult] = field(default_factory=list)
    couplings: dict[str, list[Coupling]] = field(default_factory=dict)
    """Figures of `coupling`, by model."""
    decay: Mapping[str, Any] | None = None
    """Figures of `length_decay`; None where they were left out."""


def tables(
    options: RolloutBenchOptions, cpus: Sequence[int], results: RolloutResults
) -> list[Table]:
    """Return speedups, the effect of shared noise, and accept length by position."""
    models = ", ".join(f"{name} {options.dtype_of(name)}" for name in options.model_names)
    title = (
        f"Speculative rollout: {models}; temperature 1, threads: {options.threads}, "
        f"{pinned(cpus)}; median (lowest-highest) of {options.repeats} turns"
    )
    headings = ("model, running", "drafter, strategy", "tokens/s", "speedup", "accept length")
    columns = by_position(*headings, "overhead", "texts differ")
    found = [
        Table(title, columns, [line for cell in results.cells for line in _lines(cell)]),
        Table(
            "Accept length of chains of 6, drafts coupled to the sampling noise or not",
            {
                "model": lambda row: row[0],
                "drafter": lambda row: row[1].drafter,
                "temperature": lambda row: f"{row[1].temperature:g}",
                "entropy, nats": lambda row: row[1].entropy,
                "coupled": lambda row: row[1].coupled,
                "not coupled": lambda row: row[1].uncoupled,
                "texts differ": lambda row: f"{row[1].differing_share:.1%}",
            },
            [(model, each) for model, own in results.couplings.items() for each in own],
        ),
        Table(
            "Accept length in long texts",
            {
                "drafter": lambda row: row[0],
                "window": lambda row: row[1],
                "at token 100": lambda row: row[2]["at_100"],
                "from token 1000": lambda row: row[2]["at_1000"],
            },
            [
                (drafter, window, at)
                for drafter, windows in (results.decay or {}).items()
                for window, at in windows.items()
            ],
        ),
    ]
    return [table for table in found if table.rows]


def _lines(cell: CellResult) -> Iterator[tuple[object, ...]]:
    """Yield plain decoding, then every drafter's best strategy, coupled and not."""
    name, off = f"{cell.model}, {cell.running}", f"{cell.off_tokens_per_s.median:,.0f}"
    yield name, "off", off, "1", "1", "", ""
    for each in cell.contests:
        yield (
            "",
            f"{each.drafter}, {describe(each.strategy)}",
            f"{each.tokens_per_s:,.0f}",
            each.speedup.text(unit="x"),
            each.accept_length,
            f"{each.overhead_share:.1%}",
            f"{each.differing_share:.1%}",
        )
        uncoupled = each.uncoupled_speedup.text(unit="x")
        yield "", "  not coupled", "", uncoupled, each.uncoupled_accept_length, "", ""


def as_json(
    options: RolloutBenchOptions, cpus: Sequence[int], results: RolloutResults
) -> dict[str, Any]:
    """Return the figures by model, drafter, running requests.

    Example: {"speedup": {"tiny": {"eagle3": {"1": 2.6}}}, "differing_share": {...}, ...}
    """

    def table(read: Callable[[Contest], object]) -> dict[str, dict[str, dict[str, object]]]:
        found: dict[str, dict[str, dict[str, object]]] = {}
        for cell in results.cells:
            for contest in cell.contests:
                by_running = found.setdefault(cell.model, {}).setdefault(contest.drafter, {})
                by_running[str(cell.running)] = read(contest)
        return found

    return {
        "model": options.model,
        "speedup": table(lambda contest: contest.speedup.median),
        "best_speedup": {
            model: {
                str(cell.running): max(contest.speedup.median for contest in cell.contests)
                for cell in results.cells
                if cell.model == model
            }
            for model in options.model_names
        },
        "differing_share": table(lambda contest: contest.differing_share),
        "overhead_share": table(lambda contest: contest.overhead_share),
        "accept_length": table(
            lambda contest: {
                "coupled": contest.accept_length,
                "uncoupled": contest.uncoupled_accept_length,
            }
        ),
        "length_decay": results.decay,
        "coupling": {
            model: [asdict(each) for each in own] for model, own in results.couplings.items()
        },
        "cells": [asdict(cell) for cell in results.cells],
        "setting": settings(options) | {"length": not options.quick, "pinned_cpus": list(cpus)},
    }
