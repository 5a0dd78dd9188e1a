"""Depth tuner for an engine (vLLM) that reports only time and accepted tokens of its steps.

    gain of depth k = (1 + c + c^2 + ... + c^k) / (1 + k x slope)

c is the chance that a draft stands, from what was accepted at the nearest depth that was used. The
slope is the cost of one more token of depth in plain steps, measured for each power of two of the
running requests; where it was not, that of the nearest is taken. The depth with the best gain is
used; plain decoding if none gains. Then drafts are probed, ever more rarely until the drafter has
changed.
"""

from dataclasses import dataclass
from typing import final

from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel
from longtail.tuner.messages import Batch, Outcome, Plan
from longtail.tuner.tuner import PLAIN, Tuner, fit_strategy

_RATE = 0.04
"""Least weight of a new measurement."""
_STALL = 1.0
"""Largest slope that is believed; more is a stall of the machine."""
_PROBE = 3
"""Depth of a probe."""
_LEAST_GAIN = 1.03
"""Predicted gain from which to draft."""
_FIRST_WAIT, _LONGEST_WAIT = 4, 128
"""Plans between two probes that do not pay: at first, and at most."""
_PLAIN_EVERY = 48
"""Plans with drafts after which a plain one measures the seconds of plain steps anew."""


@dataclass(slots=True)
class _Mean:
    """Mean of measurements that change slowly."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.count += 1
        self.value += (value - self.value) * max(1 / self.count, _RATE)


@final
class DepthTuner(Tuner):
    """Chooses the depth of chains; needs neither confidences nor a cost model."""

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Forget everything."""
        self._plain: dict[int, _Mean] = {}
        """Seconds of plain steps, by the digits of the running requests."""
        self._slopes: dict[int, _Mean] = {}
        self._num_drafters = num_drafters
        self._since_plain = 0
        self.reset_estimates()

    def reset_estimates(self) -> None:
        """Measure acceptance anew, and soon, since the drafter was changed."""
        self._means: dict[int, _Mean] = {}
        """Accepted tokens of a draft, by depth."""
        self._wait = self._left = _FIRST_WAIT

    def plan(self, batch: Batch) -> Plan:
        """Return the depth with the best predicted gain, or a probe."""
        size = batch.num_sampled.bit_length()
        if size not in self._plain:
            return PLAIN
        depth, gain = self._best(size, batch.room // max(batch.num_draftable, 1))
        if not self._means or (gain < _LEAST_GAIN and self._is_time()):
            self._means.clear()  # the drafter or the prompts may have changed since
            return self._chain(_PROBE, batch)
        if gain < _LEAST_GAIN:
            return PLAIN
        self._wait = self._left = _FIRST_WAIT
        self._since_plain += 1
        if self._since_plain > _PLAIN_EVERY:
            self._since_plain = 0
            return PLAIN
        return self._chain(depth, batch)

    def plain_s(self, running: int) -> float | None:
        """Return the mean seconds of plain steps of about as many requests."""
        mean = self._plain.get(running.bit_length())
        return None if mean is None else mean.value

    def _is_time(self) -> bool:
        """Return whether to probe; the next wait is twice as long."""
        self._left -= 1
        if self._left > 0:
            return False
        self._wait = self._left = min(2 * self._wait, _LONGEST_WAIT)
        return True

    def _chain(self, depth: int, batch: Batch) -> Plan:
        return fit_strategy(Strategy(depth=depth, size=depth), batch, self._num_drafters)

    def _best(self, size: int, deepest: int) -> tuple[int, float]:
        """Return the depth with the best gain over plain decoding, and the gain."""
        best, best_gain, slope = 0, 0.0, self._slope(size)
        for depth in range(1, deepest + 1 if self._means else 1):
            nearest = min(self._means, key=lambda known: abs(known - depth))
            chance = _chance(self._means[nearest].value, nearest)
            gain = (1 + _expected(chance, depth)) / (1 + depth * slope)
            if gain > best_gain:
                best, best_gain = depth, gain
        return best, best_gain

    def _slope(self, size: int) -> float:
        nearest = min(self._slopes, key=lambda known: abs(known - size), default=None)
        return 0.0 if nearest is None else max(self._slopes[nearest].value, 0.0)

    def learn(self, outcome: Outcome) -> None:
        """Learn from a step that computes no prompt tokens, which would take longer."""
        batch, depth = outcome.batch, outcome.plan.strategy.depth if outcome.plan.strategy else 0
        if outcome.num_drafts:
            mean = self._means.setdefault(depth, _Mean())
            mean.add(outcome.num_accepted / outcome.num_drafts)
        if batch.num_tokens > batch.num_sampled:
            return
        size = batch.num_sampled.bit_length()
        if not depth:
            plain = self._plain.setdefault(size, _Mean())
            if 2 * outcome.seconds < plain.value:  # earlier steps compiled or stalled
                plain.count = 0
            plain.add(outcome.seconds)
        elif outcome.num_drafts == batch.num_sampled and size in self._plain:
            share = (outcome.seconds / self._plain[size].value - 1) / depth
            self._slopes.setdefault(size, _Mean()).add(min(share, _STALL))


def _expected(chance: float, depth: int) -> float:
    """Return the expected number of accepted tokens of a chain."""
    return sum(chance**level for level in range(1, depth + 1))


def _chance(mean: float, depth: int) -> float:
    """Return the chance by which `mean` tokens of a chain are accepted."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if _expected(middle, depth) < mean else (low, middle)
    return high
