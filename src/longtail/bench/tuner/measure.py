"""Points of `longtail bench tuner`: one drafter with one number of running requests.

The fixed strategies are scanned with a short turn each; the best of the scan get turns of full
length, in turn with plain decoding and the tuners. The best fixed strategy is the best median of
these turns, so that one lucky turn does not decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from longtail.bench.common.play import Turn, largest_difference
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.rollout.measure import CHAINS, FEW, TREES, Cell, describe
from longtail.bench.rollout.subjects import Subject
from longtail.bench.tuner.drafters import maker
from longtail.bench.tuner.options import TunerBenchOptions
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.tuner.bandit import BanditTuner
from longtail.tuner.budget import BudgetTuner

OFF, BANDIT, BUDGET = "off", "beg-mab", "budget"
GRID = (*CHAINS, Strategy(depth=16, size=16))
_ADVERSARIAL_GRID = (Strategy(depth=2, size=2), Strategy(depth=6, size=6))
"""Strategies for a drafter that is always wrong: a scan would find no difference."""
_BEST = 3

Lineup = dict[str, Callable[[], Speculation | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Tokens/s of each contestant's turns; the n-th turns of all ran side by side.

    Example: Race(speeds={"off": (100.0, 90.0), "chain 4": (200.0, 210.0)}, fixed=("chain 4",))
    """

    speeds: Mapping[str, tuple[float, ...]]
    fixed: tuple[str, ...]
    """Contestants with one fixed strategy."""

    @property
    def best_fixed(self) -> str:
        """The fixed strategy with the best median."""
        return max(self.fixed, key=lambda name: median(self.speeds[name]))

    @property
    def best(self) -> str:
        """The best median of the fixed strategies and plain decoding."""
        return max((*self.fixed, OFF), key=lambda name: median(self.speeds[name]))

    def ratio(self, one: str, other: str) -> Spread:
        """Speed of `one` over that of `other`, turn by turn."""
        return ratios(self.speeds[one], self.speeds[other])

    def regret(self, one: str, other: str) -> Spread:
        """Share of the other's speed that is missing, turn by turn."""
        ratio = self.ratio(one, other)
        return Spread(median=1 - ratio.median, low=1 - ratio.high, high=1 - ratio.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Figures of one drafter with one number of running requests."""

    drafter: str
    running: int
    race: Race
    strategies: Mapping[str, Strategy]
    """Strategies of `race.fixed`."""
    scanned: Mapping[str, float]
    """Tokens/s of each strategy's short turn."""
    accept_length: Mapping[str, float]
    """Accept length of each contestant's last turn."""
    tuner_share: float
    """Share of the budget tuner's time spent in decisions, the median of its turns."""
    differing_share: float
    """Largest share of a turn's texts that differ from plain decoding's."""
    lowest_cpu_share: float
    """CPU share of the most disturbed turn; where it is low, the ratios mean little."""

    @property
    def best_strategy(self) -> Strategy | None:
        """The best strategy; None is plain decoding."""
        return self.strategies.get(self.race.best)


def lineup(make: Callable[[], Drafter], strategies: Sequence[Strategy]) -> Lineup:
    """Return for each contestant a function that prepares its next turn.

    The tuners and their drafters keep their estimates from turn to turn, as from step to step of a
    run; fixed strategies start with a new drafter.
    """
    bandit = Speculation(drafters=(make(),), tuner=BanditTuner(), guarded=False)
    budget = Speculation(drafters=(make(),), tuner=BudgetTuner())

    def fixed(strategy: Strategy) -> Callable[[], Speculation]:
        return lambda: Speculation.fixed(make(), strategy)

    return {
        OFF: lambda: None,
        **{describe(strategy): fixed(strategy) for strategy in strategies},
        BANDIT: lambda: bandit,
        BUDGET: lambda: budget,
    }


def sweep(subject: Subject, options: TunerBenchOptions, log: Log) -> list[Point]:
    """Measure every drafter with every number of running requests."""
    points = []
    for running in options.running:
        cell, tokens = Cell(subject, running), options.tokens_at(running)
        cell.turn(None, tokens // 3)  # warm-up
        for name in options.drafters:
            grid = (*GRID, *TREES) if running <= FEW else GRID
            if name == "adversarial":
                grid = _ADVERSARIAL_GRID
            make = maker(subject, name)
            scanned = cell.scan(make, grid, tokens // 3) if len(grid) > _BEST else {}
            best = sorted(grid, key=lambda strategy: -scanned.get(strategy, 0.0))[:_BEST]
            turns = _race(cell, lineup(make, best), tokens, options.repeats)
            point = summarize(name, running, turns, best, scanned)
            points.append(point)
            vs_best = point.race.ratio(BUDGET, point.race.best)
            log(f"{name}, {running} running: budget {vs_best.text()} of best, {point.race.best}")
    return points


def _race(cell: Cell, contestants: Lineup, tokens: int, repeats: int) -> dict[str, list[Turn]]:
    for tuner in (BANDIT, BUDGET):  # each explores once in a run: not timed
        cell.turn(contestants[tuner](), tokens, tuner)
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for _ in range(repeats):
        ready = {name: prepare() for name, prepare in contestants.items()}
        for name, turn in cell.turns(ready, tokens).items():
            turns[name].append(turn)
    return turns


def summarize(
    drafter: str,
    running: int,
    turns: Mapping[str, Sequence[Turn]],
    best: Sequence[Strategy],
    scanned: Mapping[Strategy, float],
) -> Point:
    """Return the figures of a point from the turns of its contestants."""
    strategies = {describe(strategy): strategy for strategy in best}
    speeds = {name: tuple(turn.tokens_per_s for turn in own) for name, own in turns.items()}
    return Point(
        drafter=drafter,
        running=running,
        race=Race(speeds=speeds, fixed=tuple(strategies)),
        strategies=strategies,
        scanned={describe(strategy): speed for strategy, speed in scanned.items()},
        accept_length={name: own[-1].accept_length for name, own in turns.items()},
        tuner_share=median(turn.report.tuner_share for turn in turns[BUDGET]),
        differing_share=max(largest_difference(turns[OFF], own) for own in turns.values()),
        lowest_cpu_share=min(turn.cpu_share for own in turns.values() for turn in own),
    )
