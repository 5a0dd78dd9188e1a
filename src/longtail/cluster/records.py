"""Records of the workers: what goes to them, what they return, and the result of a rollout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from torch import Tensor

from longtail.drafter.training.replica_gain import SpotReport
from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import RolloutSeries
from longtail.rl.learner import LearnerState
from longtail.speculation.drafter import Sums
from longtail.types import Completion

T = TypeVar("T", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of a worker's task; counts are of the present rollout."""

    beats: int = 0
    """Number of engine steps and micro-batches since the worker began: it rises during a task."""
    num_finished: int = 0
    num_generated: int = 0
    num_running: int = 0
    drafts: bool | None = None
    """Whether the last step drafted; None if the engine never does."""
    text: str = ""
    """Beginning of the completion that was finished first."""
    is_waiting: bool = False
    """Whether the worker waits for other members of the team, and makes no step meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardResult:
    """The completions of one shard of a rollout, with the measurements of its engine."""

    completions: tuple[Completion, ...]
    report: RolloutReport
    series: RolloutSeries | None
    drafted: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Begin, end, begin, end, ... of accepted drafts by request, in characters of its text."""
    sums: Sums | None = None
    """Sums over its completions, if the drafter learns from sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult(Generic[T]):
    """The end of a task: its result, its exception, or the loss of its worker."""

    worker: int
    result: T | None = None
    error: Exception | None = None
    is_lost: bool = False
    """Whether the worker's process is gone; `error` holds the cause."""

    def value(self) -> T:
        """Return the result; raise the exception of the task."""
        if self.error is not None:
            raise self.error
        return cast(T, self.result)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The completions of a rollout, with the measurements of its workers."""

    completions: tuple[Completion, ...]
    """Completions in the order of the requests."""
    shards: tuple[TaskResult[ShardResult], ...]
    """Shards in the order in which they were done; a worker that took over another has two."""
    seconds: float
    """Seconds from the start of the first shard to the end of the last one."""
    spots: tuple[SpotReport, ...] = ()
    """Trainings of the drafter while others generated."""

    @property
    def report(self) -> RolloutReport:
        """Sum of the reports of all shards."""
        return merge_reports([shard.value().report for shard in self.shards], self.seconds)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of each shard's speculation, in the order of `shards`."""
        return [
            series.line(kind, shard.worker)
            for shard in self.shards
            if (series := shard.value().series) is not None
        ]

    @property
    def drafted(self) -> dict[str, tuple[int, ...]]:
        """Accepted drafts by request, in characters of its text."""
        shards = [shard.value().drafted for shard in self.shards]
        return {name: places for drafted in shards for name, places in drafted.items()}

    @property
    def series(self) -> RolloutSeries | None:
        """Speculation decisions of the worker that was done last."""
        return self.shards[-1].value().series


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The policy in the middle of a run: its weights, and the state of its learner."""

    weights: Mapping[str, Tensor]
    learner: LearnerState
