"""Replicas: drafters that workers trained from the published one."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A drafter trained from a published one, and the measurements of both on the same texts."""

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
    NO_TEXTS = "no texts"
    """The buffer had no text to train on."""
    NOT_FINITE = "not finite"
    """A NaN or infinity occurred; the replica was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """Work and result of an interval of spot training."""

    num_steps: int
    num_tokens: int
    """Tokens trained."""
    num_reused: int
    """Number of these whose features an engine had kept; the others were computed again."""
    seconds: float
    reason: SpotEnd
    replica: Replica | None
    """Best replica measured in this interval."""
