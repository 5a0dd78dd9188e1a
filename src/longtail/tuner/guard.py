"""The guard: drafting may lose at most 1 % of the time against plain decoding, with any tuner.

Accounts in seconds hold what drafting may still lose, one for each power of two of the running
requests: drafting that loses in a full batch may well win in its tail.

    a step with drafts   + seconds that plain decoding would take for its tokens - its own seconds
    every step           + 1 % of its seconds

The seconds of plain decoding are those of the cost model, corrected in each account by what steps
without drafted nodes took lately: the model may be wrong by more than drafting gains or loses. So
one of `_CHECK_EVERY` steps is plain, and of `_CLEAR_CHECK_EVERY` where drafting clearly wins.

An account begins with the seconds of `_INITIAL` plain steps and never holds more than `_MOST`.
Drafting is paused when it is empty and the last steps, weighted by `_KEPT`, lost as a whole: on a
busy machine single slow steps empty an account that gains. It resumes when the account holds
`_RESUME` plain steps. So drafting that loses half of each step is paused after 6 steps for 200.
(If no weighted sum S of the gains x was below 0, sum x = S + (1 - `_KEPT`) (earlier S) is not.)

After a pause the drafters observe the tokens generated in it, which takes longer than a step. These
catch-up seconds are kept apart from the losses: they lengthen the next pause, and begin one only
where they exceed `_MOST` plain steps.
"""

from dataclasses import dataclass
from typing import final

from longtail.tuner.cost import CostModel
from longtail.tuner.messages import Batch, Outcome

LOSS_SHARE = 0.01
"""Fraction of all seconds that drafting may lose."""
_INITIAL, _RESUME, _CLEAR, _MOST = 3, 2, 6, 8
"""Seconds on an account at first, from which drafting resumes, from which it clearly wins, and at
most, in plain steps. A step that accepts nothing takes little from a full account."""
_CHECK_EVERY, _CLEAR_CHECK_EVERY = 16, 128
"""Steps with drafted nodes between two without, in which plain decoding is measured."""
_FEW = 4
"""Number of measurements below which nothing is clear."""
_BIAS_CLIP = 2.0
"""Largest factor between a measurement and the mean of the earlier ones."""
_BIAS_RATE = 0.1
"""Least weight of a new measurement of plain decoding."""
_KEPT = 1 - 1 / 32
"""Weight of a step with drafts relative to the next one."""
_STALL = 4.0
"""Multiple of its predicted seconds from which a step is a stall of the machine."""


@dataclass(slots=True)
class _Account:
    """Seconds that drafting may still lose in steps of a size."""

    seconds: float
    plain_step_s: float
    """Seconds of a plain step like the last one."""
    bias: float
    """Mean ratio of measured to predicted seconds of plain steps."""
    num_measured: int = 0
    since_measured: int = 0
    """Number of steps with drafted nodes since the last one without."""
    is_paused: bool = False
    catch_up_s: float = 0.0
    """Catch-up seconds that are not yet paid."""
    draft_s: float = 0.0
    """Seconds of the last steps with drafts, none before the last pause."""
    plain_s: float = 0.0
    """Predicted seconds of plain decoding for the same tokens."""

    @property
    def needs_plain_step(self) -> bool:
        """Whether the last measurement of a plain step is too old."""
        is_clear = self.seconds >= _CLEAR * self.plain_step_s and self.num_measured >= _FEW
        return self.since_measured >= (_CLEAR_CHECK_EVERY if is_clear else _CHECK_EVERY)

    def measure(self, ratio: float) -> None:
        """Add the ratio of measured to predicted seconds of a plain step."""
        self.num_measured += 1
        self.since_measured = 0
        ratio = min(max(ratio, self.bias / _BIAS_CLIP), self.bias * _BIAS_CLIP)
        self.bias += (ratio - self.bias) * max(1 / self.num_measured, _BIAS_RATE)

    def pay(self, seconds: float) -> None:
        """Add seconds; end a pause when the account also pays for catching up."""
        sum_s = self.seconds + seconds
        self.seconds = min(sum_s, _MOST * self.plain_step_s)
        self.catch_up_s = max(self.catch_up_s - (sum_s - self.seconds), 0.0)
        if self.is_paused and self.seconds >= _RESUME * self.plain_step_s + self.catch_up_s:
            self.seconds, self.catch_up_s = self.seconds - self.catch_up_s, 0.0
            self.is_paused = False
            self.draft_s = self.plain_s = 0.0


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
        return account is None or not (account.is_paused or account.needs_plain_step)

    def learn(self, outcome: Outcome) -> str:
        """Judge a step; return the reason if a pause begins after it, else an empty string."""
        batch, took_s = outcome.batch, self._without_stall(outcome)
        account = self._account(batch)
        predicted_s = self._costs.plain_s(batch)
        if not outcome.num_nodes:
            measured_s = min(outcome.verify_s, took_s)
            account.measure(measured_s / predicted_s)
        else:
            account.since_measured += 1
        self._last, account.plain_step_s = account, account.bias * predicted_s
        account.catch_up_s += outcome.catch_up_s
        account.pay(LOSS_SHARE * took_s)
        if not outcome.timings:
            return ""
        plain_s = account.plain_step_s * outcome.num_emitted / max(batch.num_sampled, 1)
        account.pay(plain_s - took_s)
        account.draft_s = _KEPT * account.draft_s + took_s
        account.plain_s = _KEPT * account.plain_s + plain_s
        overdue_s = max(account.catch_up_s - _MOST * account.plain_step_s, 0.0)
        gains = account.plain_s >= account.draft_s and not overdue_s
        if account.is_paused or account.seconds > overdue_s or gains:
            return ""
        account.is_paused = True
        return (
            f"drafting gave {account.plain_s / account.draft_s:.2f}x of plain decoding lately, at "
            f"{batch.num_sampled} running: paused until the loss is below {LOSS_SHARE:.0%} of the "
            "time"
        )

    def _account(self, batch: Batch) -> _Account:
        """Return the account of a batch; a new one begins with the last one's bias."""
        found = self._accounts.get(_size(batch))
        if found is None:
            bias = 1.0 if self._last is None else self._last.bias
            step_s = bias * self._costs.plain_s(batch)
            found = self._accounts[_size(batch)] = _Account(_INITIAL * step_s, step_s, bias)
        return found

    def _without_stall(self, outcome: Outcome) -> float:
        """Return the seconds of a step, or its predicted ones if the machine stalled in it."""
        took_s = outcome.seconds - outcome.catch_up_s
        predicted_s = self._costs.outcome_s(outcome)
        return took_s if took_s <= _STALL * predicted_s else predicted_s


def _size(batch: Batch) -> int:
    """Return the number of binary digits of the running requests."""
    return batch.num_sampled.bit_length()
