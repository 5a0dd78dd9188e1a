"""Reports of rollouts: counts, seconds and acceptance of drafts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longtail.generator import StepReport

_PARTS_S = ("engine_s", "forward_s", "sample_s", "draft_s", "draft_forward_s", "tuner_s")
"""Fields that are means over engines in `merge_reports`."""


@dataclass(slots=True, kw_only=True)
class RolloutReport:
    """Counts and seconds of a rollout, the sums over its steps."""

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
    num_accepted_later: int = 0
    num_verified_later: int = 0
    """Those of them in turn 2 and later of episodes."""
    draft_s: float = 0.0
    """Seconds of drafting, with the drafters' forward passes."""
    draft_forward_s: float = 0.0
    tuner_s: float = 0.0
    """Seconds of the tuner."""
    max_running: int = 0
    """Largest number of running requests."""
    running_s: float = 0.0
    """Request-seconds: the number of running requests summed over time."""

    def add(self, step: StepReport) -> None:
        """Add a step."""
        self.seconds += step.step_s
        self.engine_s += step.step_s
        self.forward_s += step.forward_s
        self.sample_s += step.sample_s
        self.draft_s += step.draft_s
        self.draft_forward_s += step.draft_forward_s
        self.tuner_s += step.tuner_s
        self.running_s += step.step_s * step.num_running
        self.max_running = max(self.max_running, step.num_running)
        self.num_steps += 1
        self.num_generated += len(step.emitted)
        self.num_computed += step.num_tokens
        for each in step.verified:
            self.num_drafted += each.num_drafted
            self.num_accepted += each.num_accepted
            self.num_verified += 1
            if each.turn:
                self.num_accepted_later += each.num_accepted
                self.num_verified_later += 1

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_generated / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Mean tokens per verified draft, bonus token included; 0 without any."""
        return _accept_length(self.num_accepted, self.num_verified)

    @property
    def accept_length_later(self) -> float:
        """`accept_length` in turn 2 and later of episodes."""
        return _accept_length(self.num_accepted_later, self.num_verified_later)

    @property
    def draft_share(self) -> float:
        """Fraction of the time for drafting."""
        return self._share(self.draft_s)

    @property
    def tuner_share(self) -> float:
        """Fraction of the time for the tuner."""
        return self._share(self.tuner_s)

    @property
    def bookkeeping_share(self) -> float:
        """Fraction of the time outside the sampler and all forward passes."""
        inside = self.forward_s + self.sample_s + self.draft_forward_s
        return self._share(self.engine_s - inside)

    def _share(self, part_s: float) -> float:
        return part_s / self.engine_s if self.engine_s else 0.0

    @property
    def tail_idle_share(self) -> float:
        """Fraction of the engine's slots that are idle while the longest completions finish."""
        capacity = self.max_running * self.seconds
        return 1 - self.running_s / capacity if capacity else 0.0


def _accept_length(num_accepted: int, num_verified: int) -> float:
    return 1 + num_accepted / num_verified if num_verified else 0.0


def merge_reports(reports: Sequence[RolloutReport], seconds: float) -> RolloutReport:
    """Merge the reports of engines that ran at the same time for `seconds` in all.

    Counts and slots are sums; seconds of work are means.
    """
    totals = _totals(reports)
    means = {name: totals[name] / len(reports) for name in _PARTS_S}
    return RolloutReport(**totals | means | {"seconds": seconds})


def join_reports(reports: Sequence[RolloutReport]) -> RolloutReport:
    """Join the reports of rollouts that ran one after another: sums, and the most slots."""
    most = max(report.max_running for report in reports)
    return RolloutReport(**_totals(reports) | {"max_running": most})


def _totals(reports: Sequence[RolloutReport]) -> dict[str, Any]:
    rows = [asdict(report) for report in reports]
    return {name: sum(row[name] for row in rows) for name in rows[0]}
