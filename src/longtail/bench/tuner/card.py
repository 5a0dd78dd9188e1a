"""The card of `longtail bench tuner`."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from longtail.bench.common.card import DISTURBED, Table, medians, numbers
from longtail.bench.common.process import pinned
from longtail.bench.common.timing import Spread
from longtail.bench.tuner.measure import BANDIT, BUDGET, OFF, Point, Race
from longtail.bench.tuner.options import RECIPE, TunerBenchOptions
from longtail.bench.tuner.rollout import DRAFTER, ORACLE, Rollouts

Headline = dict[str, Spread | None]


def sweep_table(options: TunerBenchOptions, cpus: Sequence[int], points: Sequence[Point]) -> Table:
    """Return a line for each drafter and number of running requests."""
    title = (
        f"Adaptive speculation: {options.model or 'tiny reasoner'}, {options.dtype_name}; threads: "
        f"{options.threads}, {pinned(cpus)}; median (lowest-highest) of {options.repeats} turns.\n"
        "Ratios are tokens/s over those of plain decoding (off) or of the best fixed strategy"
    )
    columns = {
        "drafter, running": lambda point: (
            f"{point.drafter}, {point.running}{_disturbed(point.lowest_cpu_share)}"
        ),
        "off tok/s": lambda point: f"{Spread.of(point.race.speeds[OFF]).median:,.0f}",
        "best fixed": lambda point: point.race.best_fixed,
        "best fixed / off": lambda point: point.race.ratio(point.race.best_fixed, OFF).median,
        "beg-mab / off": lambda point: point.race.ratio(BANDIT, OFF).median,
        "budget / off": lambda point: point.race.ratio(BUDGET, OFF),
        "budget / best fixed": lambda point: point.race.ratio(BUDGET, point.race.best_fixed),
    }
    return Table(title, columns, points)


def rollout_table(options: TunerBenchOptions, rollouts: Rollouts) -> Table:
    """Return a line for each contestant of the whole rollout."""
    race = rollouts.race
    strategies = ", ".join(f"{running}: {name}" for running, name in rollouts.oracle.items())
    title = (
        f"A whole rollout of {options.num_requests} requests, {DRAFTER} drafter; best fixed: "
        f"{race.best_fixed}{_disturbed(rollouts.lowest_cpu_share)}"
        + (f"\nThe oracle's strategy by running requests: {strategies}" if strategies else "")
    )
    columns = {
        "contestant": lambda name: name,
        "seconds": lambda name: rollouts.seconds[name],
        "speed / off": lambda name: race.ratio(name, OFF),
        "speed / best fixed": lambda name: race.ratio(name, race.best_fixed),
        "slower than oracle": lambda name: (
            _percent(race.regret(name, ORACLE)) if rollouts.oracle else None
        ),
        "accept length": lambda name: rollouts.accept_length[name],
    }
    return Table(title, columns, list(race.speeds))


def headline(points: Sequence[Point], rollouts: Rollouts | None) -> Headline:
    """Return the ratios of the README, None where they were not measured."""
    useful = [point.race for point in points if point.drafter != "adversarial"]
    wrong = [point.race for point in points if point.drafter == "adversarial"]
    at = {(point.drafter, point.running): point.race for point in points}
    rolled = [] if rollouts is None else [rollouts.race]

    def many(running: int) -> list[Race]:
        return [race for place, race in at.items() if place == (DRAFTER, running)]

    return {
        "worst_vs_best_fixed": _worst(race.ratio(BUDGET, race.best_fixed) for race in useful),
        "worst_vs_best": _worst(race.ratio(BUDGET, race.best) for race in useful),
        "adversarial_vs_off": _worst(race.ratio(BUDGET, OFF) for race in wrong),
        "speedup_32": _worst(race.ratio(BUDGET, OFF) for race in many(32)),
        "speedup_64": _worst(race.ratio(BUDGET, OFF) for race in many(64)),
        "rollout_vs_best_fixed": _worst(race.ratio(BUDGET, race.best_fixed) for race in rolled),
        "rollout_speedup": _worst(race.ratio(BUDGET, OFF) for race in rolled),
        "vs_beg_mab": _worst(race.ratio(BUDGET, BANDIT) for race in rolled),
    }


def regrets(rollouts: Rollouts | None) -> Headline:
    """Return the share of the oracle's speed that each tuner misses."""
    if rollouts is None or not rollouts.oracle:
        return {"beg_mab": None, "budget": None}
    race = rollouts.race
    return {"beg_mab": race.regret(BANDIT, ORACLE), "budget": race.regret(BUDGET, ORACLE)}


def as_json(
    options: TunerBenchOptions,
    cpus: Sequence[int],
    points: Sequence[Point],
    rollouts: Rollouts | None,
) -> dict[str, Any]:
    """Return the figures: medians first, their spreads and all turns behind them.

    Example: {"worst_vs_best_fixed": 0.97, ..., "regret": {"budget": 0.04, ...}, "spreads": {...}}
    """
    found, regret = headline(points, rollouts), regrets(rollouts)
    measured: list[Point | Rollouts] = [*points, *([] if rollouts is None else [rollouts])]
    rolled = None
    if rollouts is not None:
        rolled = {**asdict(rollouts), "series": rollouts.series.as_json(), **_race(rollouts.race)}
    return {
        "model": options.model,
        **medians(found),
        "regret": medians(regret),
        "tuner_share": max(each.tuner_share for each in measured),
        "differing_share": max(each.differing_share for each in measured),
        "lowest_cpu_share": min(each.lowest_cpu_share for each in measured),
        "spreads": {**numbers(found), "regret": numbers(regret)},
        "points": [_point(point) for point in points],
        "rollout": rolled,
        "setting": {
            "cells": {
                "models": [options.model or "tiny"],
                "drafters": [options.drafter or RECIPE],
                "running": options.running,
                "dtype": options.dtype,
                "tokens": options.tokens,
                "repeats": options.repeats,
                "threads": options.threads,
                "length": not options.quick,
            },
            "drafters": options.drafters,
            "num_requests": options.num_requests,
            "sweeps": options.sweep,
            "rolls": options.rollout,
            "plot": options.plot,
            "pinned_cpus": list(cpus),
        },
    }


def _point(point: Point) -> dict[str, Any]:
    vs_best_fixed = point.race.ratio(BUDGET, point.race.best_fixed).numbers()
    best = {"best": point.race.best, "vs_best_fixed": vs_best_fixed}
    return {**asdict(point), **_race(point.race), **best}


def _race(race: Race) -> dict[str, Any]:
    vs_off = {name: race.ratio(name, OFF).numbers() for name in race.speeds}
    return {"best_fixed": race.best_fixed, "vs_off": vs_off}


def _worst(ratios: Iterable[Spread]) -> Spread | None:
    return min(ratios, key=lambda ratio: ratio.median, default=None)


def _disturbed(cpu_share: float) -> str:
    """Return a warning where a turn shared its CPU with another process."""
    return "" if cpu_share >= DISTURBED else f" (CPU: {cpu_share:.0%})"


def _percent(share: Spread) -> str:
    """Render a share that may be negative. Example: 4% (-1% to 6%)"""
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})"
