"""Measures cells of `longtail bench rollout`: a cell is one model with so many requests running.

All contestants serve the same requests with the same keys on the same pinned thread, and so write
the same text: a few tokens of it each, in turn, each on an engine of its own (off, history, eagle,
off, ...). So all meet the same contexts, and the machine's moods. More requests than run are given,
so that a place that falls empty is filled; only steps in which all places are taken count. Fixed
strategies are scanned first, a short turn each; the turns that count are between `off` and every
drafter's best.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from longtail.bench.common.play import SLICE, Play, play_beside
from longtail.bench.common.report import Spread, ratios
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode
from longtail.model.transformer import Transformer
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.types import Request, SamplingParams

CHAINS = tuple(Strategy(depth=depth, size=depth) for depth in (1, 2, 3, 4, 6, 8, 11))
TREES = (Strategy(depth=4, width=2, size=8), Strategy(depth=6, width=3, size=16))
FEW = 4
"""Requests up to which trees are tried."""
_ROOM = 17
"""Flat tokens of a request in a step: its root and the largest draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, what it is asked, and who drafts for it."""

    name: str
    model: Transformer
    decode: Decode
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    drafters: Mapping[str, Callable[[], Drafter]]
    """A new one for every turn: history of the very same texts would not be fair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contestant's turn; the counts are of steps with every place taken."""

    tokens_per_s: float
    accept_length: float
    num_drafted: float
    """Nodes a draft."""
    overhead_share: float
    """Of the time: drafting, tree building, verification, outside the drafter's forward passes."""
    bookkeeping_share: float
    """Of the time: all outside forward passes and sampler; also what plain decoding has."""
    draft_forward_share: float
    sampler_share: float
    tuner_share: float
    gap_s: float
    """Of a mean step, the host alone (`StepReport.gap_s`)."""
    calibration_error: float
    cpu_share: float
    """Of the CPU, how much was had: below 1, something else ran on it."""
    texts: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A drafter with its best strategy against `off`."""

    drafter: str
    strategy: Strategy
    speedup: Spread
    uncoupled_speedup: Spread
    tokens_per_s: float
    accept_length: float
    uncoupled_accept_length: float
    overhead_share: float
    bookkeeping_share: float
    draft_forward_share: float
    sampler_share: float
    calibration_error: float
    differing_share: float
    scanned: Mapping[str, float]
    """tokens/s of each strategy's short turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell measured."""

    model: str
    running: int
    off_tokens_per_s: Spread
    off_bookkeeping_share: float
    contests: tuple[Contest, ...]


@final
class Cell:
    """One engine, and the requests that all contestants serve."""

    def __init__(self, subject: Subject, running: int) -> None:
        self._subject, self._running = subject, running
        self._engines: dict[str, RolloutEngine] = {}

    def turn(self, speculation: Speculation | None, tokens: int, name: str = "alone") -> Turn:
        """Let one contestant serve alone until so many tokens count."""
        return self.turns({name: speculation}, tokens)[name]

    def turns(self, speculations: Mapping[str, Speculation | None], tokens: int) -> dict[str, Turn]:
        """Let all serve beside each other until so many tokens of each count."""
        plays = {
            name: Play(self._engine(name), requests_of(self._subject), speculation, self._running)
            for name, speculation in speculations.items()
        }
        play_beside(list(plays.values()), SLICE * max(1, self._running // 4), tokens)
        return {name: _turn(play, speculations[name]) for name, play in plays.items()}

    def _engine(self, name: str) -> RolloutEngine:
        if name not in self._engines:
            self._engines[name] = engine_of(self._subject, self._running)
        return self._engines[name]

    def measure(self, tokens: int, repeats: int, say: Callable[[str], None]) -> CellResult:
        """Scan every drafter's strategies, then compare the best with `off`, turn by turn."""
        tokens *= max(1, self._running // 4)
        drafters = self._subject.drafters
        # Trees where few run, since many fill a step as it is.
        grid = (*CHAINS, *TREES) if self._running <= FEW else CHAINS
        scans = {name: self.scan(make, grid, tokens // 3) for name, make in drafters.items()}
        turns: dict[str, list[Turn]] = {}
        for _ in range(repeats):
            contestants: dict[str, Speculation | None] = {"off": None}
            for name, make in drafters.items():
                strategy = _best(scans[name])
                for key, coupled in ((name, True), (f"{name} uncoupled", False)):
                    contestants[key] = Speculation.fixed(make(), strategy, coupled=coupled)
            for key, turn in self.turns(contestants, tokens).items():
                turns.setdefault(key, []).append(turn)
            say(f"{self._subject.name}: {self._running} running, turn {len(turns['off'])}")
        off = turns["off"]
        return CellResult(
            model=self._subject.name,
            running=self._running,
            off_tokens_per_s=Spread.of([turn.tokens_per_s for turn in off]),
            off_bookkeeping_share=off[0].bookkeeping_share,
            contests=tuple(
                _contest(name, scans[name], off, turns[name], turns[f"{name} uncoupled"])
                for name in drafters
            ),
        )

    def scan(
        self, make: Callable[[], Drafter], grid: Sequence[Strategy], tokens: int
    ) -> dict[Strategy, float]:
        """Try every fixed strategy once; return tokens/s."""
        return {
            strategy: self.turn(Speculation.fixed(make(), strategy), tokens).tokens_per_s
            for strategy in grid
        }


def engine_of(subject: Subject, running: int) -> RolloutEngine:
    """Make an engine with room for the largest draft of every running request."""
    longest = max(len(prompt) for prompt in subject.prompts) + subject.sampling.max_tokens
    limits = EngineLimits(
        max_running=running, max_step_tokens=max(512, running * _ROOM), max_len=longest
    )
    return RolloutEngine(subject.model, subject.decode, limits)


def requests_of(subject: Subject) -> list[Request]:
    """Ask for a completion of every prompt, always with the same keys."""
    return [
        Request(
            request_id=str(index),
            prompt_tokens=prompt,
            noise_key=noise_key(0, "bench", index),
            sampling=subject.sampling,
        )
        for index, prompt in enumerate(subject.prompts)
    ]


def _turn(play: Play, speculation: Speculation | None) -> Turn:
    report, acceptance = play.end(), play.acceptance
    verified = acceptance.overall
    return Turn(
        tokens_per_s=report.tokens_per_s,
        accept_length=verified.mean,
        num_drafted=acceptance.num_drafted / max(verified.num_verified, 1),
        overhead_share=report.draft_overhead_share,
        bookkeeping_share=report.bookkeeping_share,
        draft_forward_share=report.draft_forward_s / report.seconds,
        sampler_share=report.sample_s / report.seconds,
        tuner_share=report.tuner_share,
        gap_s=report.gap_s / report.num_steps,
        calibration_error=0.0 if speculation is None else speculation.drafters[0].calibration_error,
        cpu_share=play.cpu_share,
        texts=play.texts(),
    )


def _best(scanned: Mapping[Strategy, float]) -> Strategy:
    return max(scanned, key=lambda strategy: scanned[strategy])


def _contest(
    name: str,
    scanned: Mapping[Strategy, float],
    off: Sequence[Turn],
    coupled: Sequence[Turn],
    uncoupled: Sequence[Turn],
) -> Contest:
    best = _best(scanned)
    plain = [turn.tokens_per_s for turn in off]
    last = coupled[-1]
    return Contest(
        drafter=name,
        strategy=best,
        speedup=ratios([turn.tokens_per_s for turn in coupled], plain),
        uncoupled_speedup=ratios([turn.tokens_per_s for turn in uncoupled], plain),
        tokens_per_s=last.tokens_per_s,
        accept_length=last.accept_length,
        uncoupled_accept_length=uncoupled[-1].accept_length,
        overhead_share=last.overhead_share,
        bookkeeping_share=last.bookkeeping_share,
        draft_forward_share=last.draft_forward_share,
        sampler_share=last.sampler_share,
        calibration_error=last.calibration_error,
        differing_share=max(
            differing_share(one.texts, other.texts) for one, other in zip(off, coupled, strict=True)
        ),
        scanned={describe(strategy): speed for strategy, speed in scanned.items()},
    )


def differing_share(
    one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]
) -> float:
    """Share of the texts that differ, as far as both were written."""
    both = [(one[name], other[name]) for name in one if one[name] and other[name]]
    different = sum(a[: len(b)] != b[: len(a)] for a, b in both)
    return different / max(len(both), 1)


def describe(strategy: Strategy) -> str:
    """Name a strategy: chain 6, tree 8 (depth 4, width 2)."""
    if strategy.width == 1:
        return f"chain {strategy.num_nodes}"
    return f"tree {strategy.num_nodes} (depth {strategy.depth}, width {strategy.width})"
