"""Cells of `longtail bench rollout`: a cell is one model with one number of running requests.

All contestants serve the same requests with the same noise keys on the same pinned thread, each on
an engine of its own, a few tokens each in turn. More requests are submitted than run at a time, so
that free slots are filled; only steps with a full batch count. Fixed strategies are scanned with
one short turn each; then plain decoding ("off") is compared with each drafter's best strategy.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from longtail.bench.common.play import SLICE, Play, Turn, largest_difference, play_beside
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.rollout.subjects import Subject
from longtail.engine.engine import RolloutEngine
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy

CHAINS = tuple(Strategy(depth=depth, size=depth) for depth in (1, 2, 3, 4, 6, 8, 11))
TREES = (Strategy(depth=4, width=2, size=8), Strategy(depth=6, width=3, size=16))
FEW = 4
"""Running requests up to which trees are tried; more requests fill a step without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A drafter with its best strategy against plain decoding."""

    drafter: str
    strategy: Strategy
    speedup: Spread
    uncoupled_speedup: Spread
    tokens_per_s: float
    accept_length: float
    uncoupled_accept_length: float
    overhead_share: float
    """Share of the time in drafting, tree building and verification outside forward passes."""
    bookkeeping_share: float
    """Share of the time outside forward passes and sampler."""
    draft_forward_share: float
    sampler_share: float
    calibration_error: float
    differing_share: float
    scanned: Mapping[str, float]
    """Tokens/s of each strategy's short turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """Figures of one cell."""

    model: str
    running: int
    off_tokens_per_s: Spread
    off_bookkeeping_share: float
    contests: tuple[Contest, ...]


@final
class Cell:
    """An engine for each contestant, and the requests that all of them serve."""

    def __init__(self, subject: Subject, running: int) -> None:
        self._subject, self._running = subject, running
        self._engines: dict[str, RolloutEngine] = {}

    def turn(self, speculation: Speculation | None, tokens: int, name: str = "alone") -> Turn:
        """Serve with one contestant alone until `tokens` tokens count."""
        return self.turns({name: speculation}, tokens)[name]

    def turns(self, speculations: Mapping[str, Speculation | None], tokens: int) -> dict[str, Turn]:
        """Serve with all contestants side by side until `tokens` tokens of each count."""
        plays = {
            name: Play(self._engine(name), self._subject.requests(), speculation, self._running)
            for name, speculation in speculations.items()
        }
        return play_beside(plays, SLICE * max(1, self._running // 4), tokens)

    def _engine(self, name: str) -> RolloutEngine:
        if name not in self._engines:
            self._engines[name] = self._subject.engine(self._running)
        return self._engines[name]

    def measure(self, tokens: int, repeats: int, log: Log) -> CellResult:
        """Scan every drafter's strategies, then compare the best with `off`, turn by turn."""
        tokens *= max(1, self._running // 4)
        drafters = self._subject.drafters
        grid = (*CHAINS, *TREES) if self._running <= FEW else CHAINS
        scans = {name: self.scan(make, grid, tokens // 3) for name, make in drafters.items()}
        turns: dict[str, list[Turn]] = {}
        for _ in range(repeats):
            contestants: dict[str, Speculation | None] = {"off": None}
            for name, make in drafters.items():
                best = _best(scans[name])
                contestants[name] = Speculation.fixed(make(), best)
                contestants[f"{name} uncoupled"] = Speculation.fixed(make(), best, coupled=False)
            for name, turn in self.turns(contestants, tokens).items():
                turns.setdefault(name, []).append(turn)
            log(f"{self._subject.name}: {self._running} running, turn {len(turns['off'])}")
        off = turns["off"]
        return CellResult(
            model=self._subject.name,
            running=self._running,
            off_tokens_per_s=Spread.of([turn.tokens_per_s for turn in off]),
            off_bookkeeping_share=off[0].report.bookkeeping_share,
            contests=tuple(_contest(name, scans[name], turns) for name in drafters),
        )

    def scan(
        self, make: Callable[[], Drafter], grid: Sequence[Strategy], tokens: int
    ) -> dict[Strategy, float]:
        """Try every fixed strategy once; return tokens/s."""
        return {
            strategy: self.turn(Speculation.fixed(make(), strategy), tokens).tokens_per_s
            for strategy in grid
        }


def describe(strategy: Strategy) -> str:
    """Name a strategy: chain 6, tree 8 (depth 4, width 2)."""
    if strategy.width == 1:
        return f"chain {strategy.num_nodes}"
    return f"tree {strategy.num_nodes} (depth {strategy.depth}, width {strategy.width})"


def _best(scanned: Mapping[Strategy, float]) -> Strategy:
    return max(scanned, key=lambda strategy: scanned[strategy])


def _contest(
    name: str, scanned: Mapping[Strategy, float], turns: Mapping[str, Sequence[Turn]]
) -> Contest:
    off, coupled, uncoupled = turns["off"], turns[name], turns[f"{name} uncoupled"]
    plain = [turn.tokens_per_s for turn in off]
    last, report = coupled[-1], coupled[-1].report
    return Contest(
        drafter=name,
        strategy=_best(scanned),
        speedup=ratios([turn.tokens_per_s for turn in coupled], plain),
        uncoupled_speedup=ratios([turn.tokens_per_s for turn in uncoupled], plain),
        tokens_per_s=last.tokens_per_s,
        accept_length=last.accept_length,
        uncoupled_accept_length=uncoupled[-1].accept_length,
        overhead_share=report.draft_overhead_share,
        bookkeeping_share=report.bookkeeping_share,
        draft_forward_share=report.draft_forward_s / report.seconds,
        sampler_share=report.sample_s / report.seconds,
        calibration_error=last.calibration_error,
        differing_share=largest_difference(off, coupled),
        scanned={describe(strategy): speed for strategy, speed in scanned.items()},
    )
