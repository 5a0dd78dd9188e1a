"""What a run writes down after every step: metrics.jsonl, its further writers, rollouts.jsonl.

A run that speculates adds a line to speculation.jsonl (`rollout_log`) after every rollout; that
grows as fast as the texts, so its oldest lines go once it exceeds `run.speculation_mb`. cost.json
(`cost_file`) is small and says what is known now, so it is written anew after each step; no run
reads it. trace.json says what the workers did, drafter.jsonl what was decided about a drafter that
is trained.
Lines of a step are written once, whole, in rising order; a resumed run cuts back to its checkpoint
first. What the numbers mean is `step_metrics`' business.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from longtail.cluster import trace
from longtail.cluster.publisher import Decision
from longtail.cluster.timeline import Timeline
from longtail.cluster.trace import TraceFile
from longtail.config.rl import RunConfig
from longtail.engine import rollout_log
from longtail.engine.rollout_log import LoggedRollout
from longtail.run.metrics import JsonLines, open_writers
from longtail.run.step_metrics import rollout_row
from longtail.tuner import cost_file
from longtail.tuner.cost import CostModel
from longtail.types import Rollout

DRAFTER_FILE = "drafter.jsonl"


class RunLogger:
    """Open from the first step of a sitting to its last; `last_step` is the checkpoint's."""

    def __init__(self, config: RunConfig, directory: Path, *, last_step: int | None) -> None:
        self._keeps_rollouts = config.run.save_rollouts
        self._metrics = open_writers(
            config.run.writers, directory, last_step=last_step, config=config.model_dump()
        )
        self._rollouts = JsonLines(directory / "rollouts.jsonl", last_step=last_step)
        self._directory = directory
        self._most_bytes = config.run.speculation_mb * 2**20 or None
        self._series: JsonLines | None = None
        if (directory / rollout_log.FILE).exists():  # cut back even if nobody speculates any more
            self._series = self._open_series(last_step)
        self._drafter: JsonLines | None = None
        if (directory / DRAFTER_FILE).exists():
            self._drafter = JsonLines(directory / DRAFTER_FILE, last_step=last_step)
        self._trace = TraceFile(directory / trace.FILE, last_step=last_step)

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        rollouts: Sequence[Rollout],
        costs: CostModel | None = None,
    ) -> None:
        """Keep one step. Raises CheckpointError when the disk refuses."""
        for rollout in rollouts if self._keeps_rollouts else ():
            self._rollouts.append(step, rollout_row(rollout))
        if costs is not None:
            cost_file.save_costs(self._directory / cost_file.FILE, costs)
        self._metrics.write(step, metrics)

    def log(self, rollout: LoggedRollout) -> None:
        """Keep what was decided in a rollout. Raises CheckpointError when the disk refuses."""
        if self._series is None:
            self._series = self._open_series(rollout.step)
        self._series.append(rollout.step, rollout.as_json())

    def _open_series(self, last_step: int | None) -> JsonLines:
        path = self._directory / rollout_log.FILE
        return JsonLines(path, last_step=last_step, most_bytes=self._most_bytes)

    def log_workers(self, step: int, did: Timeline, decisions: Sequence[Decision]) -> None:
        """Keep what the workers did in a step, and what was decided about the drafter."""
        self.trace(step, did)
        for decision in decisions:
            if self._drafter is None:
                self._drafter = JsonLines(self._directory / DRAFTER_FILE, last_step=step)
            self._drafter.append(step, asdict(decision))

    def trace(self, step: int, did: Timeline) -> None:
        """Keep what the workers did; of a step, or between two of them."""
        self._trace.append(step, did)

    def close(self) -> None:
        """Write out what is pending."""
        self._metrics.close()
        self._rollouts.close()
        self._trace.close()
        for lines in (self._series, self._drafter):
            if lines is not None:
                lines.close()
