"""The guard: drafting may lose at most 1 % of the time against plain decoding, with any tuner.

Accounts in seconds hold what drafting may still lose, one for each power of two of the running
requests: drafting that loses in a full batch may well win in its tail.

    a step with drafts   + seconds that plain decoding would take for its tokens - its own seconds
    every step           + 1 % of its seconds

An account is never above the seconds of `_GRANT` plain steps, its initial value. Drafting is paused
when it is empty, and resumes when it holds `_RESUME` plain steps. So drafting that loses half of
each step is paused after 16 steps for 200, and past gains pay for no more than the grant.
"""

from dataclasses import dataclass
from typing import final

from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Outcome

LOSS_SHARE = 0.01
"""Share of all seconds that drafting may lose."""
_GRANT, _RESUME = 8, 2
"""Seconds on an account at most, and from which drafting resumes, in plain steps."""
_STALL = 4.0
"""Multiple of its predicted seconds from which a step is a stall of the machine."""


@dataclass(slots=True)
class _Account:
    """Seconds that drafting may still lose in steps of a size."""

    seconds: float
    plain_step_s: float
    """Predicted seconds of a plain step like the last one."""
    is_paused: bool = False
    draft_s: float = 0.0
    """Seconds of the steps with drafts since the last pause."""
    plain_s: float = 0.0
    """Predicted seconds of plain decoding for the same tokens."""
    num_drafted: int = 0

    def pay(self, seconds: float) -> None:
        """Add seconds; end a pause when the account holds enough."""
        self.seconds = min(self.seconds + seconds, _GRANT * self.plain_step_s)
        if self.is_paused and self.seconds >= _RESUME * self.plain_step_s:
            self.is_paused = False
            self.draft_s = self.plain_s = 0.0
            self.num_drafted = 0


@final
class Guard:
    """Judges the steps of one engine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._accounts: dict[int, _Account] = {}
        self._last: _Account | None = None

    def allows(self, batch: Batch) -> bool:
        """Return whether a step may draft."""
        account = self._accounts.get(_size(batch))
        return account is None or not account.is_paused

    def count_repeat(self) -> None:
        """Count a plain step that is not reported to `learn`, because it repeats the last one."""
        if self._last is not None:
            self._last.pay(LOSS_SHARE * self._last.plain_step_s)

    def learn(self, outcome: Outcome) -> str:
        """Judge a step; return the reason if a pause begins after it, else an empty string."""
        batch, step_s = outcome.batch, self._costs.plain_s(outcome.batch)
        account = self._accounts.setdefault(_size(batch), _Account(_GRANT * step_s, step_s))
        self._last, account.plain_step_s = account, step_s
        took_s = self._without_stall(outcome)
        account.pay(LOSS_SHARE * took_s)
        if not outcome.timings:
            return ""
        plain_s = step_s * outcome.num_emitted / max(batch.num_sampled, 1)
        account.pay(plain_s - took_s)
        account.draft_s += took_s
        account.plain_s += plain_s
        account.num_drafted += 1
        if account.is_paused or account.seconds > 0:
            return ""
        account.is_paused = True
        return (
            f"drafting gave {account.plain_s / account.draft_s:.2f}x of plain decoding over "
            f"{account.num_drafted} steps, at {batch.num_sampled} running: paused until the loss "
            f"is below {LOSS_SHARE:.0%} of the time"
        )

    def _without_stall(self, outcome: Outcome) -> float:
        """Return the seconds of a step, or its predicted ones if the machine stalled in it."""
        predicted_s = self._costs.outcome_s(outcome)
        return outcome.seconds if outcome.seconds <= _STALL * predicted_s else predicted_s


def _size(batch: Batch) -> int:
    """Return the number of binary digits of the running requests."""
    return batch.num_sampled.bit_length()
