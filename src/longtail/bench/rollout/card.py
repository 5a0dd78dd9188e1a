"""How `longtail bench rollout` shows its cells: a table for people, one object for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from longtail.bench.common.report import Spread
from longtail.bench.rollout.measure import CellResult, Contest, describe
from longtail.bench.rollout.options import Setting

if TYPE_CHECKING:
    from longtail.bench.rollout.coupling import Coupling

COLUMNS = (
    "model, running",
    "drafter, strategy",
    "tokens/s",
    "speedup",
    "accept",
    "overhead",
    "differing",
)


def title(setting: Setting, cpus: Sequence[int]) -> str:
    """Say what was measured and where."""
    where = f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"
    models = ", ".join(f"{name} {setting.dtype_of(name)}" for name in setting.models)
    return (
        f"Speculative rollout: {models}; temperature 1, threads: {setting.threads}, {where}; "
        f"median (lowest-highest) of {setting.repeats} turns"
    )


def rows(cell: CellResult) -> list[list[str]]:
    """Render one cell: plain decoding, then every drafter's best strategy, coupled and not."""
    off = cell.off_tokens_per_s
    lines = [["off", f"{off.median:,.0f}", "1", "1", "", ""]]
    for contest in cell.contests:
        lines.append(
            [
                f"{contest.drafter}, {describe(contest.strategy)}",
                f"{contest.tokens_per_s:,.0f}",
                _times(contest.speedup),
                f"{contest.accept_length:.2f}",
                f"{contest.overhead_share:.1%}",
                f"{contest.differing_share:.1%}",
            ]
        )
        lines.append(
            [
                "  uncoupled",
                "",
                _times(contest.uncoupled_speedup),
                f"{contest.uncoupled_accept_length:.2f}",
                "",
                "",
            ]
        )
    names = [f"{cell.model}, {cell.running}"] + [""] * (len(lines) - 1)
    return [[name, *line] for name, line in zip(names, lines, strict=True)]


def coupling_rows(couplings: Mapping[str, Sequence["Coupling"]]) -> list[list[str]]:
    """Render accept lengths with and without the noise."""
    return [
        [
            f"{model}, T {each.temperature:g}, {each.entropy:.2f} nats",
            f"{each.drafter}, chain 6",
            "",
            "",
            f"{each.coupled:.2f} coupled, {each.uncoupled:.2f} not",
            "",
            f"{each.differing_share:.1%}",
        ]
        for model, found in couplings.items()
        for each in found
    ]


def decay_rows(decay: Mapping[str, Any] | None) -> list[list[str]]:
    """Render accept length early and late in long texts."""
    return [
        [
            "long texts",
            f"{drafter}, {label} window",
            "",
            "",
            f"{at['at_100']:.2f} at 100, {at['at_1000']:.2f} at 1000+",
            "",
            "",
        ]
        for drafter, labels in (decay or {}).items()
        for label, at in labels.items()
    ]


def _times(ratio: Spread) -> str:
    """Render a ratio. Example: 2.44x (2.40-2.51)"""
    return f"{ratio.median:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"


def as_json(
    cells: Sequence[CellResult],
    couplings: Mapping[str, Sequence["Coupling"]],
    decay: Mapping[str, Any] | None,
    setting: Setting,
    cpus: Sequence[int],
) -> dict[str, Any]:
    """Arrange the figures: by model, drafter, running requests.

    Example: {"speedup": {"tiny": {"eagle3": {"1": 2.6}}}, "differing_share": {...}, ...}
    """

    def table(read: Any) -> dict[str, dict[str, dict[str, Any]]]:
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for cell in cells:
            for contest in cell.contests:
                by_model = found.setdefault(cell.model, {}).setdefault(contest.drafter, {})
                by_model[str(cell.running)] = read(contest)
        return found

    def lengths(contest: Contest) -> dict[str, float]:
        return {
            "coupled": contest.accept_length,
            "uncoupled": contest.uncoupled_accept_length,
        }

    return {
        "speedup": table(lambda contest: contest.speedup.median),
        "best_speedup": {
            model: {
                str(cell.running): max(contest.speedup.median for contest in cell.contests)
                for cell in cells
                if cell.model == model
            }
            for model in setting.models
        },
        "differing_share": table(lambda contest: contest.differing_share),
        "overhead_share": table(lambda contest: contest.overhead_share),
        "accept_length": table(lengths),
        "length_decay": decay,
        "coupling": {model: [asdict(each) for each in found] for model, found in couplings.items()},
        "cells": [asdict(cell) for cell in cells],
        "setting": asdict(setting) | {"pinned_cpus": list(cpus)},
    }
