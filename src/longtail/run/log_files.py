"""Log files of a run: metrics.jsonl, rollouts.jsonl, and those of speculation and the cluster.

speculation.jsonl (`engine.rollout_log`) gets a line per rollout and worker. drafts.jsonl has the
drafted characters of each text; rollouts.jsonl does not, because drafts can differ for equal texts.
trace.json (`run.trace`) has the states of the workers, drafter.jsonl the decisions about a
drafter in training.

Every line is written once, in order of steps; a resumed run first drops the lines after its
checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from longtail.cluster.work.drafter_versions import Decision
from longtail.cluster.workers.states import Timeline
from longtail.config.rl import RunSection
from longtail.engine import rollout_log
from longtail.engine.rollout_log import TRAINING
from longtail.run.metrics_log import JsonLines, MetricLog
from longtail.run.step_metrics import StepRecord, rollout_row
from longtail.run.trace import TRACE_FILE, TraceFile

ROLLOUTS, DRAFTS, DECISIONS = "rollouts.jsonl", "drafts.jsonl", "drafter.jsonl"


class RunLogger:
    """Log files of a run. Its methods raise CheckpointError if the disk refuses.

    `last_step` is the checkpoint's step, None for a new run. `shown` is the run's whole
    configuration, which some writers show.
    """

    def __init__(
        self, own: RunSection, directory: Path, *, last_step: int | None, shown: Mapping[str, Any]
    ) -> None:
        self._keeps_rollouts = own.save_rollouts
        self._metrics = MetricLog(own.writers, directory, last_step=last_step, config=shown)
        self._trace = TraceFile(directory / TRACE_FILE, last_step=last_step)
        names = (ROLLOUTS, rollout_log.FILE, DRAFTS, DECISIONS)
        self._files = {name: JsonLines(directory / name, last_step=last_step) for name in names}

    def write(self, step: int, metrics: Mapping[str, float], record: StepRecord) -> None:
        """Write one step: metrics, rollouts, speculation and costs."""
        for each in record.rounds:
            self.log(step, each.rollout.logged(TRAINING))
        if self._keeps_rollouts:
            for rollout in record.rollouts:
                self._files[ROLLOUTS].write(step, rollout_row(rollout))
            if record.series is not None:
                parts = [each.rollout.drafted for each in record.rounds]
                drafted = {name: places for part in parts for name, places in part.items()}
                self._files[DRAFTS].write(step, {"drafted": drafted})
        self._metrics.write(step, metrics)

    def log(self, step: int, lines: Iterable[dict[str, Any]]) -> None:
        """Write the speculation of a rollout, one line per worker."""
        for line in lines:
            self._files[rollout_log.FILE].write(step, line)

    def log_workers(self, step: int, states: Timeline, decisions: Sequence[Decision]) -> None:
        """Write the states of the workers in or before a step, and the decisions in it."""
        self._trace.append(step, states)
        for decision in decisions:
            self._files[DECISIONS].write(step, asdict(decision))

    def close(self) -> None:
        """Close all files."""
        self._metrics.close()
        self._trace.close()
        for file in self._files.values():
            file.close()
