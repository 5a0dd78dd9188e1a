"""Points of `longtail bench tuner`: one drafter, so many requests running, all contestants in turn.

The fixed strategies are scanned with a short turn each; the best of the scan get turns of full
length, beside plain decoding and the tuners. The best fixed strategy is the best median of these:
the luck of a single turn does not decide.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from longtail.bench.common.report import Spread, ratios
from longtail.bench.rollout.measure import (
    CHAINS,
    FEW,
    TREES,
    Cell,
    Subject,
    Turn,
    describe,
    differing_share,
)
from longtail.bench.tuner.drafters import maker
from longtail.bench.tuner.options import Setting
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.tuner.bandit import BanditTuner
from longtail.tuner.budget import BudgetTuner

OFF, BANDIT, BUDGET = "off", "beg-mab", "budget"
GRID = (*CHAINS, Strategy(depth=16, size=16))
_HOPELESS = (Strategy(depth=2, size=2), Strategy(depth=6, size=6))
"""For a drafter that is always wrong; which of them is best is no question."""
_BEST = 3

Lineup = dict[str, Callable[[], Speculation | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Tokens/s of every contestant's turns; the n-th turns of all were run beside each other.

    Example: Race(speeds={"off": (100.0, 90.0), "chain 4": (200.0, 210.0)}, fixed=("chain 4",))
    """

    speeds: Mapping[str, tuple[float, ...]]
    fixed: tuple[str, ...]
    """Contestants that draft by one strategy."""

    @property
    def best_fixed(self) -> str:
        """The fixed strategy with the best median."""
        return max(self.fixed, key=self._median)

    @property
    def best(self) -> str:
        """The same, where plain decoding counts as one."""
        return max((*self.fixed, OFF), key=self._median)

    def ratio(self, one: str, other: str) -> Spread:
        """How many times as fast as the other, turn by turn."""
        return ratios(self.speeds[one], self.speeds[other])

    def regret(self, one: str, other: str) -> Spread:
        """Share of the other's speed that is missing, turn by turn."""
        ratio = self.ratio(one, other)
        return Spread(median=1 - ratio.median, low=1 - ratio.high, high=1 - ratio.low)

    def _median(self, name: str) -> float:
        return median(self.speeds[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one drafter is worth with so many requests running."""

    drafter: str
    running: int
    race: Race
    strategies: Mapping[str, Strategy]
    """Those of `race.fixed`."""
    scanned: Mapping[str, float]
    """tokens/s of each strategy's short turn."""
    accept_length: Mapping[str, float]
    """Of each contestant's last turn."""
    tuner_share: float
    """Of the budget tuner's time: deciding; median of its turns."""
    differing_share: float
    """Most texts of a turn that differ from plain decoding's."""
    lowest_cpu_share: float
    """Of all turns; where it is low, something else ran, and the ratios say little."""

    @property
    def best_strategy(self) -> Strategy | None:
        """What an oracle would play; None is plain decoding."""
        return self.strategies.get(self.race.best)


def lineup(make: Callable[[], Drafter], strategies: Sequence[Strategy]) -> Lineup:
    """Name the contestants and what makes each ready for a turn.

    The tuners keep what they and their drafters learned from turn to turn, as from step to step of
    a run; fixed strategies have nothing to learn.
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


def sweep(subject: Subject, setting: Setting, say: Callable[[str], None]) -> list[Point]:
    """Measure every drafter with every number of running requests."""
    points = []
    for running in setting.cells.running:
        cell = Cell(subject, running)
        cell.turn(None, setting.tokens_at(running) // 3)  # whatever first turns are slowed by
        for name in setting.drafters:
            point = _measure(cell, running, name, maker(subject, name), setting)
            points.append(point)
            best, vs_best = point.race.best, point.race.ratio(BUDGET, point.race.best)
            say(f"{name}, {running} running: budget {vs_best.text()} of the best, {best}")
    return points


def _measure(
    cell: Cell, running: int, name: str, make: Callable[[], Drafter], setting: Setting
) -> Point:
    """Scan, then compare, turn by turn."""
    tokens = setting.tokens_at(running)
    grid = (*GRID, *TREES) if running <= FEW else GRID
    if name == "adversarial":
        grid = _HOPELESS
    scanned = cell.scan(make, grid, tokens // 3) if len(grid) > _BEST else {}
    best = sorted(grid, key=lambda strategy: -scanned.get(strategy, 0.0))[:_BEST]
    contestants = lineup(make, best)
    turns: dict[str, list[Turn]] = {contestant: [] for contestant in contestants}
    for learner in (BANDIT, BUDGET):  # what it costs to find out is paid once in a run
        cell.turn(contestants[learner](), tokens, learner)
    for _ in range(setting.cells.repeats):
        ready = {contestant: begin() for contestant, begin in contestants.items()}
        for contestant, turn in cell.turns(ready, tokens).items():
            turns[contestant].append(turn)
    strategies = {describe(strategy): strategy for strategy in best}
    speeds = {each: tuple(turn.tokens_per_s for turn in own) for each, own in turns.items()}
    return Point(
        drafter=name,
        running=running,
        race=Race(speeds=speeds, fixed=tuple(strategies)),
        strategies=strategies,
        scanned={describe(strategy): speed for strategy, speed in scanned.items()},
        accept_length={each: own[-1].accept_length for each, own in turns.items()},
        tuner_share=median(turn.tuner_share for turn in turns[BUDGET]),
        differing_share=max(
            differing_share(plain.texts, turn.texts)
            for own in turns.values()
            for plain, turn in zip(turns[OFF], own, strict=True)
        ),
        lowest_cpu_share=min(turn.cpu_share for own in turns.values() for turn in own),
    )
