"""Reports of engine steps and rollouts: counts, seconds and acceptance of drafts."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from longtail.generator import StepReport, Verified

_PARTS_S = ("engine_s", "forward_s", "sample_s", "draft_s", "draft_forward_s", "tuner_s")
"""Fields that are means over engines in `merge_reports`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """Counts and seconds of a rollout."""

    seconds: float = 0.0
    engine_s: float = 0.0
    """Seconds of engine steps; the mean of several engines."""
    forward_s: float = 0.0
    sample_s: float = 0.0
    num_steps: int = 0
    num_generated: int = 0
    num_computed: int = 0
    """Number of computed flat tokens: generated, prompt and recomputed ones."""
    num_drafted: int = 0
    """Number of verified nodes."""
    num_accepted: int = 0
    num_verified: int = 0
    """Number of verified drafts; they yield `num_accepted` + `num_verified` tokens."""
    draft_s: float = 0.0
    """Seconds of drafting, with the drafters' forward passes."""
    draft_forward_s: float = 0.0
    tuner_s: float = 0.0
    """Seconds of the tuner."""
    max_running: int = 0
    """Largest number of running requests."""
    running_s: float = 0.0
    """Request-seconds: the number of running requests summed over time."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_generated / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens per verified draft, bonus token included; 0 without any."""
        verified = self.num_verified
        return (self.num_accepted + verified) / verified if verified else 0.0

    @property
    def draft_share(self) -> float:
        """Share of the time for drafting."""
        return self._share(self.draft_s)

    @property
    def tuner_share(self) -> float:
        """Share of the time for the tuner."""
        return self._share(self.tuner_s)

    @property
    def bookkeeping_share(self) -> float:
        """Share of the time outside the sampler and all forward passes."""
        inside = self.forward_s + self.sample_s + self.draft_forward_s
        return self._share(self.engine_s - inside)

    def _share(self, part_s: float) -> float:
        return part_s / self.engine_s if self.engine_s else 0.0

    @property
    def tail_idle_share(self) -> float:
        """Share of the engine's slots that are idle while the longest completions finish."""
        capacity = self.max_running * self.seconds
        return 1 - self.running_s / capacity if capacity else 0.0


def merge_reports(reports: Sequence[RolloutReport], seconds: float) -> RolloutReport:
    """Merge the reports of engines that ran at the same time for `seconds` in all.

    Counts and slots are sums; seconds of work are means.
    """
    rows = [asdict(report) for report in reports]
    totals = {name: sum(row[name] for row in rows) for name in rows[0]}
    means = {name: totals[name] / len(rows) for name in _PARTS_S}
    return RolloutReport(**totals | means | {"seconds": seconds})


def join_reports(reports: Sequence[RolloutReport]) -> RolloutReport:
    """Join the reports of rollouts that ran one after another: sums, and the most slots."""
    rows = [asdict(report) for report in reports]
    totals = {name: sum(row[name] for row in rows) for name in rows[0]}
    return RolloutReport(**totals | {"max_running": max(row["max_running"] for row in rows)})


@dataclass(slots=True)
class RolloutMeter:
    """Sums step reports to a rollout report."""

    _sums: dict[str, Any] = field(default_factory=lambda: asdict(RolloutReport()))

    def add(self, step: StepReport) -> None:
        """Add a step."""
        added = {
            "seconds": step.step_s,
            "engine_s": step.step_s,
            "forward_s": step.forward_s,
            "sample_s": step.sample_s,
            "draft_s": step.draft_s,
            "draft_forward_s": step.draft_forward_s,
            "tuner_s": step.tuner_s,
            "running_s": step.step_s * step.num_running,
            "num_steps": 1,
            "num_generated": len(step.emitted),
            "num_computed": step.num_tokens,
            "num_drafted": sum(each.num_drafted for each in step.verified),
            "num_accepted": sum(each.num_accepted for each in step.verified),
            "num_verified": len(step.verified),
        }
        for name, value in added.items():
            self._sums[name] += value
        self._sums["max_running"] = max(self._sums["max_running"], step.num_running)

    def report(self) -> RolloutReport:
        """Return the report of all steps so far."""
        return RolloutReport(**self._sums)


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
    """Sums `Verified` records to accept length, also by position, and acceptance rate by depth."""

    def __init__(self) -> None:
        self._verified = [0] * len(POSITIONS)
        self._accepted = [0] * len(POSITIONS)
        self.num_drafted = 0
        """Number of verified nodes."""
        self._reached: list[int] = []
        self._accepted_at: list[int] = []

    def add(self, verified: Iterable[Verified]) -> None:
        """Add some drafts."""
        for each in verified:
            index = bisect_right(POSITIONS, each.position) - 1
            self._verified[index] += 1
            self._accepted[index] += each.num_accepted
            self.num_drafted += each.num_drafted
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
