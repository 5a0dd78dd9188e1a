"""The guard: drafting may lose at most 1 % of the time against plain decoding, with any tuner.

An account in seconds holds what drafting may still lose.

    a step with drafts   + seconds that plain decoding would take for its tokens - its own seconds
    every step           + 1 % of its seconds

The account is never above the seconds of `_GRANT` plain steps, its initial value. Drafting is
paused when it is empty, and resumes when it holds `_RESUME` plain steps. So drafting that loses
half of each step is paused after 32 steps for 400, drafting that loses hundredths goes on half of
the time, and past gains pay for no more than the grant.
"""

from typing import final

from longtail.tuner.cost import CostModel
from longtail.tuner.records import Outcome

LOSS_SHARE = 0.01
"""Share of all seconds that drafting may lose."""
_GRANT, _RESUME = 16, 4
"""Seconds on the account at most, and from which drafting resumes, in plain steps."""
_STALL = 4.0
"""Multiple of its predicted seconds from which a step is a stall of the machine."""


@final
class Guard:
    """Judges the steps of one engine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._account_s: float | None = None
        """Seconds that drafting may still lose; None before the first step."""
        self._plain_step_s = 0.0
        """Predicted seconds of a plain step like the last one."""
        self._is_paused = False
        self._draft_s = self._plain_s = 0.0
        """Seconds of the steps with drafts since the last pause, and of plain decoding instead."""
        self._num_drafted = 0

    @property
    def allows(self) -> bool:
        """Whether the next step may draft."""
        return not self._is_paused

    def count_repeat(self) -> None:
        """Count a plain step that is not reported to `learn`, because it repeats the last one."""
        if self._account_s is not None:
            self._pay(LOSS_SHARE * self._plain_step_s)

    def learn(self, outcome: Outcome) -> str:
        """Judge a step; return the reason if a pause begins after it, else an empty string."""
        step_s = self._plain_step_s = self._costs.plain_s(outcome.batch)
        if self._account_s is None:
            self._account_s = _GRANT * step_s
        took_s = self._without_stall(outcome)
        self._pay(LOSS_SHARE * took_s)
        if not outcome.timings:
            return ""
        plain_s = step_s * outcome.num_emitted / max(outcome.batch.num_sampled, 1)
        self._pay(plain_s - took_s)
        self._draft_s, self._plain_s = self._draft_s + took_s, self._plain_s + plain_s
        self._num_drafted += 1
        if self._is_paused or self._account_s > 0:
            return ""
        self._is_paused = True
        return (
            f"drafting gave {self._plain_s / self._draft_s:.2f}x of plain decoding over "
            f"{self._num_drafted} steps, at {outcome.batch.num_sampled} running: paused until the "
            f"loss is below {LOSS_SHARE:.0%} of the time"
        )

    def _without_stall(self, outcome: Outcome) -> float:
        """Return the seconds of a step, or its predicted ones if the machine stalled in it."""
        predicted_s = self._costs.outcome_s(outcome)
        return outcome.seconds if outcome.seconds <= _STALL * predicted_s else predicted_s

    def _pay(self, seconds: float) -> None:
        """Add seconds to the account; end a pause when it holds enough."""
        assert self._account_s is not None, "the first step makes it"
        self._account_s = min(self._account_s + seconds, _GRANT * self._plain_step_s)
        if self._is_paused and self._account_s >= _RESUME * self._plain_step_s:
            self._is_paused = False
            self._draft_s = self._plain_s = 0.0
            self._num_drafted = 0
