"""The result of a rollout: its completions, and the measurements of its workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longtail.cluster.records import ShardResult
from longtail.cluster.workers.processes import TaskResult
from longtail.drafter.training.replica import SpotReport
from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import RolloutSeries
from longtail.types import Completion


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
    num_moved: int = 0
    """Number of requests that moved to another worker."""
    stolen_s: float = 0.0
    """Seconds that the rollout lost to work beside it, as measured by the workers' speed."""
    slowest: float = 1.0
    """Speed of the slowest worker, as a share of the fastest one's."""

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


def reused_share(spots: Sequence[SpotReport]) -> float:
    """Return the share of spot training tokens whose features the worker's engine had kept."""
    trained = sum(spot.num_tokens for spot in spots)
    return sum(spot.num_reused for spot in spots) / trained if trained else 0.0
