"""Whether idle workers train the drafter in a rollout, or are idle too briefly for it.

Training is stopped between two layers of the target or two chunks of rows, and the step waits for
that. Where this takes more than 1 % of a rollout, and workers are idle for about as long, training
costs more than it brings. Then it is tried again only after 1, 2, 4, ... rollouts, so that N
rollouts of that kind have about log2(N) + N / 16 trials.
"""

from typing import final

_LEAST = 3.0
"""Least seconds of training for each second in which a worker waits for its stop."""
_FREE = 0.01
"""Share of a rollout that a stop may always take."""
_MAX_WAIT = 16


@final
class IdleTraining:
    """Decides before each rollout; a rollout without any training decides nothing."""

    def __init__(self) -> None:
        self._wait, self._left = 1, 0
        """Rollouts without training after the next trial, and those that are left of this wait."""

    def wants(self) -> bool:
        """Return whether idle workers train in the next rollout; called once for each."""
        if self._left:
            self._left -= 1
            return False
        return True

    def record(self, trained_s: float, waited_s: float, rollout_s: float) -> None:
        """Record a rollout's seconds, summed over workers: of training, of its stop, of all."""
        if trained_s <= 0.0:
            return
        if waited_s <= _FREE * rollout_s or trained_s >= _LEAST * waited_s:
            self._wait = 1
            return
        self._left, self._wait = self._wait, min(2 * self._wait, _MAX_WAIT)
