"""How drafts fared: accept length, acceptance rate by depth, accept length by position."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from longtail.engine.report import Verified

POSITIONS = (0, 50, 150, 300, 600, 1000)
"""Generated tokens before the step: where the ranges by position begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLength:
    """Accept length over some verify steps.

    Example: AcceptLength(num_verified=100, num_accepted=250).mean == 3.5
    """

    num_verified: int
    num_accepted: int

    @property
    def mean(self) -> float:
        """Tokens emitted a verify step, the bonus token included; 0 without any."""
        return 1 + self.num_accepted / self.num_verified if self.num_verified else 0.0


@final
class Acceptance:
    """Sums `Verified` records."""

    def __init__(self) -> None:
        self._verified = [0] * len(POSITIONS)
        self._accepted = [0] * len(POSITIONS)
        self._drafted = 0
        self._tried: list[int] = []
        self._kept: list[int] = []

    def add(self, verified: Iterable[Verified]) -> None:
        """Count some drafts."""
        for each in verified:
            place = bisect_right(POSITIONS, each.position) - 1
            self._verified[place] += 1
            self._accepted[place] += each.num_accepted
            self._drafted += each.num_drafted
            missing = each.depth - len(self._tried)
            self._tried += [0] * missing
            self._kept += [0] * missing
            for depth in range(min(each.depth, each.num_accepted + 1)):
                self._tried[depth] += 1
                self._kept[depth] += depth < each.num_accepted

    @property
    def overall(self) -> AcceptLength:
        """Of all drafts."""
        return AcceptLength(num_verified=sum(self._verified), num_accepted=sum(self._accepted))

    @property
    def num_drafted(self) -> int:
        """Nodes verified."""
        return self._drafted

    def by_position(self) -> list[AcceptLength]:
        """Of drafts behind so many generated tokens, in the ranges of POSITIONS."""
        return [
            AcceptLength(num_verified=verified, num_accepted=accepted)
            for verified, accepted in zip(self._verified, self._accepted, strict=True)
        ]

    def rates(self) -> list[float]:
        """Of each depth: the share of drafts accepted there, of those accepted down to it."""
        return [
            kept / tried if tried else 0.0
            for kept, tried in zip(self._kept, self._tried, strict=True)
        ]
