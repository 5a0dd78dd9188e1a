"""Contestants that serve the same requests beside each other, a few tokens each in turn.

A shared machine is now quick, now slow, for seconds at a time. What is compared is therefore not
run one after the other: a slice of a tenth of a second each, round after round, and whatever comes
over the machine comes over all of them.
"""

import sys
from collections.abc import Sequence
from typing import final

from longtail.bench.common.report import CpuClock
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter, RolloutReport, StepReport
from longtail.engine.rollout_log import RolloutLog, RolloutSeries
from longtail.engine.speculation.acceptance import Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.types import Request

SLICE = 32
"""Tokens that a contestant writes before it is another's turn, with one request running."""
_READS_PROMPTS = 2
"""First steps, which do not count where only steps with every place taken do."""


@final
class Play:
    """One contestant at work; with `full_at`, only steps with so many requests running count."""

    def __init__(
        self,
        engine: RolloutEngine,
        requests: Sequence[Request],
        speculation: Speculation | None,
        full_at: int = 0,
    ) -> None:
        self._engine, self._full_at = engine, full_at
        self._clock = CpuClock()
        self._texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self._meter, self._log, self._num_steps = RolloutMeter(), RolloutLog(), 0
        self.acceptance = Acceptance()
        self.num_counted = 0
        """Tokens that count."""
        for request in requests:
            engine.submit(request)
        engine.speculate(speculation)

    @property
    def is_over(self) -> bool:
        """Tell whether everything was served."""
        return not self._engine.num_unfinished

    @property
    def cpu_share(self) -> float:
        """Of the CPU, how much was had."""
        return self._clock.share()

    def advance(self, tokens: int) -> None:
        """Serve until so many tokens count in all."""
        with self._clock:
            while self.num_counted < tokens and not self.is_over:
                self._num_steps += 1
                self._note(self._engine.step())

    def _note(self, step: StepReport) -> None:
        for failure in step.failed:
            raise failure.error
        for each in step.emitted:
            self._texts[each.request_id].append(each.token)
        full = step.num_running == self._full_at and self._num_steps > _READS_PROMPTS
        if full or not self._full_at:
            self._meter.add(step)
            self._log.add(step)
            self.acceptance.add(step.verified)
            self.num_counted += len(step.emitted)

    def end(self) -> RolloutReport:
        """Give up what is not done; return what counted."""
        for name in self._texts:
            if self._engine.is_unfinished(name):
                self._engine.abort(name)
        return self._meter.report()

    def series(self) -> RolloutSeries | None:
        """Return the steps that counted, None without speculation."""
        return self._log.series()

    def texts(self) -> dict[str, tuple[int, ...]]:
        """Return what was written, whether it counted or not."""
        return {name: tuple(tokens) for name, tokens in self._texts.items()}


def play_beside(plays: Sequence[Play], slice_tokens: int, tokens: int = sys.maxsize) -> None:
    """Let all advance, a slice each in turn, until so many tokens of each count, or to the end."""
    goal = 0
    while not all(play.is_over or play.num_counted >= tokens for play in plays):
        goal = min(goal + slice_tokens, tokens)
        for play in plays:
            play.advance(goal)
