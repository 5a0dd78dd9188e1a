"""The whole rollout of `longtail bench tuner`: all requests at once, served to the end.

The long tail is what an adaptive engine is for: it begins with every place taken and ends with a
single request. A fixed strategy is the same all along; the oracle plays, at every number of running
requests, the strategy that was best there in the sweep.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import final

from longtail.bench.common.play import SLICE, Play, play_beside
from longtail.bench.common.report import Spread
from longtail.bench.rollout.measure import (
    Subject,
    describe,
    differing_share,
    engine_of,
    requests_of,
)
from longtail.bench.tuner.drafters import maker
from longtail.bench.tuner.measure import BANDIT, BUDGET, GRID, OFF, Lineup, Point, Race, lineup
from longtail.bench.tuner.options import MAX_RUNNING, Setting
from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Plan
from longtail.tuner.tuner import PLAIN, Tuner, fit_strategy

ORACLE = "oracle"
DRAFTER = "good"
_SLICE = 4 * SLICE
"""Two steps at first, a tenth of a second in the tail."""

Table = Mapping[int, Strategy | None]
"""What to play at numbers of running requests; None is plain decoding."""


@final
class OracleTuner(Tuner):
    """Plays what is known to be best at the number of running requests that is nearest."""

    def __init__(self, table: Table) -> None:
        self._table, self._num_drafters = table, 1

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Ask all of them."""
        self._num_drafters = num_drafters

    def plan(self, batch: Batch) -> Plan:
        """Look it up; the nearest by ratio."""
        nearest = min(self._table, key=lambda running: abs(math.log(running / batch.num_sampled)))
        strategy = self._table[nearest]
        return PLAIN if strategy is None else fit_strategy(strategy, batch, self._num_drafters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One contestant's rollout."""

    report: RolloutReport
    texts: Mapping[str, tuple[int, ...]]
    cpu_share: float
    series: RolloutSeries | None
    """None without speculation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What all contestants' rollouts took."""

    race: Race
    seconds: Mapping[str, Spread]
    accept_length: Mapping[str, float]
    tail_idle_share: Mapping[str, float]
    tuner_share: float
    differing_share: float
    lowest_cpu_share: float
    oracle: Mapping[int, str]
    """What it plays; empty without a sweep, and then it is no contestant."""
    series: RolloutSeries
    """Of the budget tuner's last rollout."""


def oracle_table(points: Sequence[Point]) -> dict[int, Strategy | None]:
    """Return the best of each number of running requests, with the rollout's drafter."""
    return {point.running: point.best_strategy for point in points if point.drafter == DRAFTER}


def measure_rollouts(
    subject: Subject, setting: Setting, points: Sequence[Point], say: Callable[[str], None]
) -> Rollouts:
    """Roll out the same requests with every contestant in turn."""
    requests = requests_of(subject)[: setting.num_requests]
    make, table = maker(subject, DRAFTER), oracle_table(points)
    contestants: Lineup = lineup(make, GRID)
    if table:
        contestants[ORACLE] = partial(_oracle, make, table)
    engines = {name: engine_of(subject, MAX_RUNNING) for name in contestants}
    for first in (OFF, BANDIT, BUDGET):  # a first rollout is slow; what tuners find out is kept
        roll({first: Play(engines[first], requests, contestants[first]())})
    rolled: dict[str, list[Rollout]] = {name: [] for name in contestants}
    for turn in range(setting.cells.repeats):
        rollouts = roll(
            {name: Play(engines[name], requests, begin()) for name, begin in contestants.items()}
        )
        for name, rollout in rollouts.items():
            rolled[name].append(rollout)
        off_s, mine_s = (rollouts[name].report.seconds for name in (OFF, BUDGET))
        say(f"rollout {turn + 1}: off {off_s:.2f} s, budget {mine_s:.2f} s")
    return summarize(rolled, {running: _named(best) for running, best in table.items()})


def roll(plays: Mapping[str, Play]) -> dict[str, Rollout]:
    """Let all contestants serve all requests to the end, beside each other."""
    play_beside(list(plays.values()), _SLICE)
    return {
        name: Rollout(
            report=play.end(), texts=play.texts(), cpu_share=play.cpu_share, series=play.series()
        )
        for name, play in plays.items()
    }


def summarize(rolled: Mapping[str, Sequence[Rollout]], oracle: Mapping[int, str]) -> Rollouts:
    """Arrange the rollouts of each contestant."""
    reports = {name: [each.report for each in own] for name, own in rolled.items()}
    speeds = {name: tuple(each.tokens_per_s for each in own) for name, own in reports.items()}
    series = rolled[BUDGET][-1].series
    assert series is not None, "the budget tuner speculates"
    return Rollouts(
        race=Race(speeds=speeds, fixed=tuple(describe(strategy) for strategy in GRID)),
        seconds={name: Spread.of([each.seconds for each in own]) for name, own in reports.items()},
        accept_length={name: own[-1].accept_length for name, own in reports.items()},
        tail_idle_share={name: own[-1].tail_idle_share for name, own in reports.items()},
        tuner_share=median(report.tuner_share for report in reports[BUDGET]),
        differing_share=max(
            differing_share(plain.texts, one.texts)
            for own in rolled.values()
            for plain, one in zip(rolled[OFF], own, strict=True)
        ),
        lowest_cpu_share=min(one.cpu_share for own in rolled.values() for one in own),
        oracle=oracle,
        series=series,
    )


def _oracle(make: Callable[[], Drafter], table: Table) -> Speculation:
    return Speculation(drafters=(make(),), tuner=OracleTuner(table), guarded=False)


def _named(strategy: Strategy | None) -> str:
    return OFF if strategy is None else describe(strategy)
