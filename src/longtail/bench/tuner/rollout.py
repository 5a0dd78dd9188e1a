"""The whole rollout of `longtail bench tuner`: all requests submitted at once, served to the end.

It begins with a full batch and ends with a single request. A fixed strategy stays the same
throughout; the oracle uses, at every number of running requests, the strategy that was best there
in the sweep.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from longtail.bench.common.play import SLICE, Play, Turn, largest_difference, play_beside
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread
from longtail.bench.rollout.measure import describe
from longtail.bench.rollout.subjects import Subject
from longtail.bench.tuner.drafters import maker
from longtail.bench.tuner.measure import BANDIT, BUDGET, GRID, OFF, Lineup, Point, Race, lineup
from longtail.bench.tuner.options import MAX_RUNNING, TunerBenchOptions
from longtail.engine.rollout_log import RolloutSeries
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Plan
from longtail.tuner.tuner import PLAIN, Tuner, fit_strategy

ORACLE = "oracle"
DRAFTER = "good"
_SLICE_TOKENS = 4 * SLICE
"""Two steps at first, a tenth of a second in the tail."""

Table = Mapping[int, Strategy | None]
"""Strategies by number of running requests; None is plain decoding."""


@final
class OracleTuner(Tuner):
    """Uses the strategy that is known to be best at the nearest number of running requests."""

    def __init__(self, table: Table) -> None:
        self._table, self._num_drafters = table, 1

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Draft with all drafters."""
        self._num_drafters = num_drafters

    def plan(self, batch: Batch) -> Plan:
        """Return the strategy at the number of requests that is nearest by ratio."""
        nearest = min(self._table, key=lambda running: abs(math.log(running / batch.num_sampled)))
        strategy = self._table[nearest]
        return PLAIN if strategy is None else fit_strategy(strategy, batch, self._num_drafters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Figures of all contestants' rollouts."""

    race: Race
    seconds: Mapping[str, Spread]
    accept_length: Mapping[str, float]
    tail_idle_share: Mapping[str, float]
    tuner_share: float
    differing_share: float
    lowest_cpu_share: float
    oracle: Mapping[int, str]
    """Names of the oracle's strategies; empty without a sweep, which leaves the oracle out."""
    series: RolloutSeries
    """Steps of the budget tuner's last rollout."""


def oracle_table(points: Sequence[Point]) -> dict[int, Strategy | None]:
    """Return the best strategy by number of running requests, for the rollout's drafter."""
    return {point.running: point.best_strategy for point in points if point.drafter == DRAFTER}


def measure_rollouts(
    subject: Subject, options: TunerBenchOptions, points: Sequence[Point], log: Log
) -> Rollouts:
    """Serve the same requests with every contestant in turn."""
    requests = subject.requests()[: options.num_requests]
    make, table = maker(subject, DRAFTER), oracle_table(points)
    contestants: Lineup = lineup(make, GRID)
    if table:
        contestants[ORACLE] = lambda: Speculation(
            drafters=(make(),), tuner=OracleTuner(table), guarded=False
        )
    engines = {name: subject.engine(MAX_RUNNING) for name in contestants}

    def serve(names: Sequence[str]) -> dict[str, Turn]:
        plays = {name: Play(engines[name], requests, contestants[name]()) for name in names}
        return play_beside(plays, _SLICE_TOKENS)

    for name in (OFF, BANDIT, BUDGET):  # warm-up; the tuners keep their estimates
        serve([name])
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(1, options.repeats + 1):
        for name, turn in serve(list(contestants)).items():
            turns[name].append(turn)
        off_s, budget_s = (turns[name][-1].report.seconds for name in (OFF, BUDGET))
        log(f"rollout {number}: off {off_s:.2f} s, budget {budget_s:.2f} s")
    names = {n: OFF if best is None else describe(best) for n, best in table.items()}
    return summarize(turns, names)


def summarize(turns: Mapping[str, Sequence[Turn]], oracle: Mapping[int, str]) -> Rollouts:
    """Return the figures of all contestants' rollouts."""
    series = turns[BUDGET][-1].series
    assert series is not None, "the budget tuner speculates"
    reports = {name: [turn.report for turn in own] for name, own in turns.items()}
    return Rollouts(
        race=Race(
            speeds={name: tuple(turn.tokens_per_s for turn in own) for name, own in turns.items()},
            fixed=tuple(describe(strategy) for strategy in GRID),
        ),
        seconds={name: Spread.of([each.seconds for each in own]) for name, own in reports.items()},
        accept_length={name: own[-1].accept_length for name, own in reports.items()},
        tail_idle_share={name: own[-1].tail_idle_share for name, own in reports.items()},
        tuner_share=median(report.tuner_share for report in reports[BUDGET]),
        differing_share=max(largest_difference(turns[OFF], own) for own in turns.values()),
        lowest_cpu_share=min(turn.cpu_share for own in turns.values() for turn in own),
        oracle=oracle,
        series=series,
    )
