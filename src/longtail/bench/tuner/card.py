"""How `longtail bench tuner` shows its races: two tables for people, one object for programs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from longtail.bench.common.report import Spread
from longtail.bench.engine.card import DISTURBED
from longtail.bench.tuner.measure import BANDIT, BUDGET, OFF, Point
from longtail.bench.tuner.options import Setting
from longtail.bench.tuner.rollout import DRAFTER, ORACLE, Rollouts

Headline = dict[str, Spread | None]

SWEEP_COLUMNS = (
    "drafter, running",
    "off tok/s",
    "best fixed",
    "x of off",
    "beg-mab",
    "budget, x of off",
    "x of best fixed",
)
ROLLOUT_COLUMNS = ("contestant", "seconds", "x of off", "x of best fixed", "regret", "accept")


def sweep_title(setting: Setting, cpus: Sequence[int]) -> str:
    """Say what was measured and where."""
    where = f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"
    return (
        f"Adaptive speculation: tiny reasoner, {setting.dtype}; threads: {setting.cells.threads}, "
        f"{where}; median (lowest-highest) of {setting.cells.repeats} turns"
    )


def rollout_title(setting: Setting, rollouts: Rollouts) -> str:
    """Say what was rolled out, and what the oracle played."""
    played = ", ".join(f"{running}: {name}" for running, name in rollouts.oracle.items())
    oracle = f"\nThe oracle plays {played}" if played else ""
    return (
        f"A whole rollout of {setting.num_requests} requests, {DRAFTER} drafter; best fixed: "
        f"{rollouts.race.best_fixed}{_shared(rollouts.lowest_cpu_share)}{oracle}"
    )


def sweep_rows(points: Sequence[Point]) -> list[list[str]]:
    """Render a line a point."""
    rows = []
    for point in points:
        race = point.race
        rows.append(
            [
                f"{point.drafter}, {point.running}{_shared(point.lowest_cpu_share)}",
                f"{Spread.of(race.speeds[OFF]).median:,.0f}",
                race.best_fixed,
                f"{race.ratio(race.best_fixed, OFF).median:.2f}",
                f"{race.ratio(BANDIT, OFF).median:.2f}",
                race.ratio(BUDGET, OFF).text(),
                race.ratio(BUDGET, race.best_fixed).text(),
            ]
        )
    return rows


def rollout_rows(rollouts: Rollouts) -> list[list[str]]:
    """Render a line a contestant."""
    race = rollouts.race
    return [
        [
            name,
            rollouts.seconds[name].text(),
            race.ratio(name, OFF).text(),
            race.ratio(name, race.best_fixed).text(),
            _percent(race.regret(name, ORACLE)) if rollouts.oracle else "",
            f"{rollouts.accept_length[name]:.2f}",
        ]
        for name in race.speeds
    ]


def headline(points: Sequence[Point], rollouts: Rollouts | None) -> Headline:
    """Gather the ratios that count, None where they were not measured."""
    useful = [point.race for point in points if point.drafter != "adversarial"]
    wrong = [point.race for point in points if point.drafter == "adversarial"]
    found: Headline = {
        "worst_vs_best_fixed": _worst(race.ratio(BUDGET, race.best_fixed) for race in useful),
        "worst_vs_best": _worst(race.ratio(BUDGET, race.best) for race in useful),
        "adversarial_vs_off": _worst(race.ratio(BUDGET, OFF) for race in wrong),
    }
    for running in (32, 64):
        found[f"speedup_{running}"] = _worst(
            point.race.ratio(BUDGET, OFF)
            for point in points
            if (point.drafter, point.running) == (DRAFTER, running)
        )
    rolled = [] if rollouts is None else [rollouts.race]
    found["rollout_vs_best_fixed"] = _worst(race.ratio(BUDGET, race.best_fixed) for race in rolled)
    found["rollout_speedup"] = _worst(race.ratio(BUDGET, OFF) for race in rolled)
    found["vs_beg_mab"] = _worst(race.ratio(BUDGET, BANDIT) for race in rolled)
    return found


def regrets(rollouts: Rollouts | None) -> Headline:
    """How much the tuners miss of the oracle's speed."""
    if rollouts is None or not rollouts.oracle:
        return {"beg_mab": None, "budget": None}
    race = rollouts.race
    return {"beg_mab": race.regret(BANDIT, ORACLE), "budget": race.regret(BUDGET, ORACLE)}


def as_json(
    points: Sequence[Point], rollouts: Rollouts | None, setting: Setting, cpus: Sequence[int]
) -> dict[str, Any]:
    """Arrange the figures: medians first, their spreads and all turns behind them.

    Example: {"worst_vs_best_fixed": 0.97, ..., "regret": {"budget": 0.04, ...}, "spreads": {...}}
    """
    found, regret = headline(points, rollouts), regrets(rollouts)
    measured: list[Point | Rollouts] = [*points, *([] if rollouts is None else [rollouts])]
    return {
        **_medians(found),
        "regret": _medians(regret),
        "tuner_share": max(each.tuner_share for each in measured),
        "differing_share": max(each.differing_share for each in measured),
        "lowest_cpu_share": min(each.lowest_cpu_share for each in measured),
        "spreads": _spreads(found) | {"regret": _spreads(regret)},
        "points": [_point(point) for point in points],
        "rollout": None if rollouts is None else _rollout(rollouts),
        "setting": asdict(setting) | {"pinned_cpus": list(cpus)},
    }


def _point(point: Point) -> dict[str, Any]:
    race = point.race
    return asdict(point) | {
        "best_fixed": race.best_fixed,
        "best": race.best,
        "vs_best_fixed": race.ratio(BUDGET, race.best_fixed).numbers(),
        "vs_off": {name: race.ratio(name, OFF).numbers() for name in race.speeds},
    }


def _rollout(rollouts: Rollouts) -> dict[str, Any]:
    race = rollouts.race
    return asdict(rollouts) | {
        "series": rollouts.series.as_json(),
        "best_fixed": race.best_fixed,
        "vs_off": {name: race.ratio(name, OFF).numbers() for name in race.speeds},
    }


def _worst(ratios: Iterable[Spread]) -> Spread | None:
    return min(ratios, key=lambda ratio: ratio.median, default=None)


def _medians(found: Headline) -> dict[str, float | None]:
    return {name: None if spread is None else spread.median for name, spread in found.items()}


def _spreads(found: Headline) -> dict[str, Any]:
    return {name: None if spread is None else spread.numbers() for name, spread in found.items()}


def _shared(cpu_share: float) -> str:
    """Tell when a turn was not alone on its CPU."""
    return "" if cpu_share >= DISTURBED else f" (CPU: {cpu_share:.0%})"


def _percent(share: Spread) -> str:
    """Render a share that may be negative. Example: 4% (-1% to 6%)"""
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
