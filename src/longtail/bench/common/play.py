"""Contestants that serve the same requests side by side, a few tokens each in turn.

A shared machine is faster or slower for seconds at a time. Contestants therefore take turns of
about a tenth of a second, so that each disturbance falls on all of them.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from longtail.bench.common.timing import CpuClock
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter, RolloutReport, StepReport
from longtail.engine.rollout_log import RolloutLog, RolloutSeries
from longtail.engine.speculation.acceptance import Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.types import Request

SLICE = 32
"""Tokens of one contestant's slice with one request running."""
_PREFILL_STEPS = 2
"""First steps, which read prompts and never count as steps with a full batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One contestant's results; report, acceptance and series are of the steps that count."""

    report: RolloutReport
    acceptance: Acceptance
    texts: Mapping[str, tuple[int, ...]]
    """Tokens written by request, in all steps."""
    cpu_share: float
    """CPU seconds over seconds: below 1, another process had the core."""
    series: RolloutSeries | None
    """Steps one by one; None without speculation."""
    calibration_error: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.report.tokens_per_s

    @property
    def accept_length(self) -> float:
        """Tokens per verified draft."""
        return self.acceptance.overall.mean


@final
class Play:
    """One contestant at work; with `full_at`, only steps with that many running requests count."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        speculation: Speculation | None,
        full_at: int | None = None,
    ) -> None:
        self._engine, self._full_at, self._speculation = engine, full_at, speculation
        self._clock = CpuClock()
        self._texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._meter, self._log, self._num_steps = RolloutMeter(), RolloutLog(), 0
        self._acceptance = Acceptance()
        self.num_counted = 0
        """Number of tokens in the steps that count."""
        for request in requests:
            engine.submit(request)
        engine.speculate(speculation)

    @property
    def is_over(self) -> bool:
        """Whether all requests are finished."""
        return not self._engine.num_unfinished

    def advance(self, tokens: int) -> None:
        """Serve until `tokens` tokens count in total."""
        with self._clock:
            while self.num_counted < tokens and not self.is_over:
                self._num_steps += 1
                self._record(self._engine.step())

    def _record(self, step: StepReport) -> None:
        for failure in step.failed:
            raise failure.error
        for each in step.emitted:
            self._texts[each.request_id].append(each.token)
        is_full = step.num_running == self._full_at and self._num_steps > _PREFILL_STEPS
        if is_full or self._full_at is None:
            self._meter.add(step)
            self._log.add(step)
            self._acceptance.add(step.verified)
            self.num_counted += len(step.emitted)

    def end(self) -> Turn:
        """Abort unfinished requests and return the results."""
        for name in self._texts:
            if self._engine.is_unfinished(name):
                self._engine.abort(name)
        drafters = self._speculation.drafters if self._speculation is not None else ()
        return Turn(
            report=self._meter.report(),
            acceptance=self._acceptance,
            texts={name: tuple(tokens) for name, tokens in self._texts.items()},
            cpu_share=self._clock.share(),
            series=self._log.series(),
            calibration_error=drafters[0].calibration_error if drafters else 0.0,
        )


def play_beside(
    plays: Mapping[str, Play], slice_tokens: int, tokens: int = sys.maxsize
) -> dict[str, Turn]:
    """Advance all contestants, a slice each in turn, until `tokens` of each count or the end."""
    goal = 0
    while not all(play.is_over or play.num_counted >= tokens for play in plays.values()):
        goal = min(goal + slice_tokens, tokens)
        for play in plays.values():
            play.advance(goal)
    return {name: play.end() for name, play in plays.items()}


def differing_share(
    one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]
) -> float:
    """Return the share of the texts that differ, over the length that both were written to."""
    both = [(one[name], other[name]) for name in one if one[name] and other[name]]
    different = sum(a[: len(b)] != b[: len(a)] for a, b in both)
    return different / max(len(both), 1)


def largest_difference(plain: Sequence[Turn], others: Sequence[Turn]) -> float:
    """Return the largest `differing_share` of turns made side by side."""
    return max(
        differing_share(one.texts, other.texts) for one, other in zip(plain, others, strict=True)
    )
