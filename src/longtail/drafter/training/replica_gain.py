"""Replicas: drafters that workers trained from the published one, and what training them gains.

measured replicas --rise of the accept length per second of training--> gain in seconds
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from torch import Tensor

FADE = 0.8
"""Weight of a measurement relative to one of the next rollout: its policy is older."""
_HORIZON = 3.0
"""Rollouts that a rise shortens, the present one included, before the policy has moved on."""
_PRIOR_RISE = 0.01
"""Rise of the accept length that is assumed beyond the measured one, so that a fresh drafter is
trained, and one that rose no more again once its measurements have faded."""
_FRACTION = 0.1
"""Fraction of a rollout's time for training while all wait, until its gain is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A drafter trained from a published one, and measurements of both on the same sequences."""

    base_version: int
    weights: Mapping[str, Tensor]
    num_tokens: int
    """Tokens trained since the base, repeats included."""
    seconds: float
    """Seconds of training since the base, until the newest measurement."""
    accept_len: float
    """Expected accept length of a chain of the measured depths; NaN without held-out text."""
    base_accept_len: float

    @property
    def gain(self) -> float:
        """Relative rise of the expected accept length; NaN if unmeasured."""
        return self.accept_len / self.base_accept_len - 1.0


class SpotEnd(StrEnum):
    """Reason why an interval of spot training ended."""

    STOPPED = "stopped"
    """The caller stopped it."""
    NO_SEQUENCES = "no sequences"
    """The buffer had no sequence to train on."""
    NOT_FINITE = "not finite"
    """A NaN or infinity occurred; the replica was discarded."""


@dataclass(slots=True, kw_only=True)
class SpotReport:
    """Work and result of an interval of spot training."""

    num_steps: int = 0
    num_tokens: int = 0
    """Tokens trained."""
    num_reused: int = 0
    """Number of these whose features an engine had kept; the others were computed again."""
    seconds: float = 0.0
    reason: SpotEnd = SpotEnd.STOPPED
    replica: Replica | None = None
    """Best replica measured in this interval."""


@final
class DrafterGain:
    """Predicts what training brings, from the replicas measured before; lives as long as a run."""

    def __init__(self) -> None:
        self._rise = self._seconds = 0.0
        """Faded sums: relative rises of the accept length, and the seconds of training for them."""
        self._last: dict[int, tuple[int, float, float]] = {}
        """Base version, gain and seconds of the last replica of each trainer."""

    def begin_rollout(self) -> None:
        """Fade the measurements, which are those of an older policy."""
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

        Completions are generated at most as much faster as the accept length rises.
        """
        if seconds <= 0.0:
            return 0.0
        rise = seconds * (self._rise + _PRIOR_RISE)  # in units of 1 / self._seconds
        return _HORIZON * rollout_s * (rise / (self._seconds + rise))

    def share_s(self, rollout_s: float) -> float:
        """Return the seconds to train after a rollout while all wait; 0 if it costs more."""
        seconds = _FRACTION * rollout_s
        return seconds if self.gain_s(seconds, rollout_s) > seconds else 0.0
