"""Gain of training a drafter, in seconds, as a cluster and TRL predict it.

measured replicas --rise of the accept length per second of training--> gain in seconds
"""

import math
from typing import final

from longtail.drafter.training.replica import Replica

FADE = 0.8
"""Weight of a measurement relative to one of the next rollout: its policy is older."""
_HORIZON = 3.0
"""Rollouts that a rise shortens, the present one included, before the policy has moved on."""
_PRIOR_RISE = 0.01
"""Rise of the accept length that is possible beyond what was measured: less would be lost among
the differences of texts. It outweighs few measured seconds: a fresh drafter is tried, and one that
rose no more is tried again once its measurements have faded."""
_SHARE = 0.1
"""Training while all wait takes this share of a rollout's time, so that one that brings nothing
costs a tenth, until it is measured."""


@final
class DrafterGain:
    """Predicts what training brings, from the replicas measured before; lives as long as a run."""

    def __init__(self) -> None:
        self._rise = self._seconds = 0.0
        """Faded sums: relative rises of the accept length, and the seconds of training for them."""
        self._last: dict[int, tuple[int, float, float]] = {}
        """Base version, gain and seconds of the last replica of each trainer."""

    def begin_rollout(self) -> None:
        """Fade what is known: it was measured with an older policy."""
        self._rise, self._seconds = FADE * self._rise, FADE * self._seconds

    def record(self, trainer: int, replica: Replica) -> None:
        """Record a replica of a worker or process; only what is new since its last one counts."""
        version, gain, seconds = self._last.get(trainer, (-1, 0.0, 0.0))
        if version != replica.base_version:
            gain = seconds = 0.0
        now = gain if math.isnan(replica.gain) else max(gain, replica.gain)
        self._rise += now - gain
        self._seconds += max(replica.seconds - seconds, 0.0)
        self._last[trainer] = replica.base_version, now, replica.seconds

    def gain_s(self, seconds: float, rollout_s: float) -> float:
        """Return the seconds that rollouts of `rollout_s` become shorter by training `seconds`.

        Texts are generated at most as much faster as the accept length rises.
        """
        if seconds <= 0.0:
            return 0.0
        rise = seconds * (self._rise + _PRIOR_RISE)  # in units of 1 / self._seconds
        return _HORIZON * rollout_s * (rise / (self._seconds + rise))

    def share_s(self, rollout_s: float) -> float:
        """Return the seconds to train after a rollout while all wait; 0 if it costs more."""
        seconds = _SHARE * rollout_s
        return seconds if self.gain_s(seconds, rollout_s) > seconds else 0.0
