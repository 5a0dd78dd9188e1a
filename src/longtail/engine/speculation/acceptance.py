"""Acceptance statistics: accept length, also by position, and acceptance rate by depth."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from longtail.engine.report import Verified

POSITIONS = (0, 50, 150, 300, 600, 1000)
"""Starts of the ranges of positions (generated tokens before the step)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLength:
    """Accept length over some verified drafts.

    Example: AcceptLength(num_verified=100, num_accepted=250).mean == 3.5
    """

    num_verified: int
    num_accepted: int

    @property
    def mean(self) -> float:
        """Mean tokens per verified draft, bonus token included; 0 without any."""
        return 1 + self.num_accepted / self.num_verified if self.num_verified else 0.0


@final
class Acceptance:
    """Sums `Verified` records."""

    def __init__(self) -> None:
        self._verified = [0] * len(POSITIONS)
        self._accepted = [0] * len(POSITIONS)
        self._drafted = 0
        self._reached: list[int] = []
        self._accepted_at: list[int] = []

    def add(self, verified: Iterable[Verified]) -> None:
        """Add some drafts."""
        for each in verified:
            index = bisect_right(POSITIONS, each.position) - 1
            self._verified[index] += 1
            self._accepted[index] += each.num_accepted
            self._drafted += each.num_drafted
            missing = each.depth - len(self._reached)
            self._reached += [0] * missing
            self._accepted_at += [0] * missing
            for depth in range(min(each.depth, each.num_accepted + 1)):
                self._reached[depth] += 1
                self._accepted_at[depth] += depth < each.num_accepted

    @property
    def overall(self) -> AcceptLength:
        """Accept length of all drafts."""
        return AcceptLength(num_verified=sum(self._verified), num_accepted=sum(self._accepted))

    @property
    def num_drafted(self) -> int:
        """Number of verified nodes."""
        return self._drafted

    def by_position(self) -> list[AcceptLength]:
        """Return the accept length for each range of POSITIONS."""
        return [
            AcceptLength(num_verified=verified, num_accepted=accepted)
            for verified, accepted in zip(self._verified, self._accepted, strict=True)
        ]

    def rates(self) -> list[float]:
        """Return for each depth the share of drafts accepted there, among those that reach it."""
        return [
            kept / tried if tried else 0.0
            for kept, tried in zip(self._accepted_at, self._reached, strict=True)
        ]
