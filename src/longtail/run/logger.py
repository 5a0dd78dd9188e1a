"""Log files of a run: metrics.jsonl, rollouts.jsonl, and those of speculation and the cluster.

speculation.jsonl (`engine.rollout_log`) gets a line per rollout and worker; its oldest lines are
dropped beyond `run.speculation_mb`. drafts.jsonl has the drafted characters of each text, bounded
alike; rollouts.jsonl does not, because the same texts may be drafted otherwise.
cost.json (`tuner.cost_file`) holds the newest cost model.
trace.json (`cluster.timeline`) has the states of the workers, drafter.jsonl the decisions about a
drafter in training.

Every line is written once, in order of steps; a resumed run first drops the lines after its
checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from longtail.cluster.drafter.publisher import Decision
from longtail.cluster.timeline import TRACE_FILE, Timeline, TraceFile
from longtail.config.rl import RunConfig
from longtail.engine import rollout_log
from longtail.engine.rollout_log import TRAINING, LoggedRollout
from longtail.run.metrics import JsonLines, open_writers
from longtail.run.step_metrics import StepRecord, rollout_row
from longtail.tuner import cost_file

DRAFTER_FILE, DRAFTS_FILE = "drafter.jsonl", "drafts.jsonl"


class RunLogger:
    """Log files of a run. Its methods raise CheckpointError if the disk refuses.

    `last_step` is the checkpoint's step, None for a new run.
    """

    def __init__(self, config: RunConfig, directory: Path, *, last_step: int | None) -> None:
        self._keeps_rollouts = config.run.save_rollouts
        self._metrics = open_writers(
            config.run.writers, directory, last_step=last_step, config=config.model_dump()
        )
        self._rollouts = JsonLines(directory / "rollouts.jsonl", last_step=last_step)
        self._directory = directory
        self._max_bytes = config.run.speculation_mb * 2**20 or None
        self._speculation: JsonLines | None = None
        if (directory / rollout_log.FILE).exists():  # cut back even if the run drafts no more
            self._speculation = self._open_speculation(last_step)
        self._drafts: JsonLines | None = None
        if (directory / DRAFTS_FILE).exists():
            self._drafts = self._open_drafts(last_step)
        self._drafter: JsonLines | None = None
        if (directory / DRAFTER_FILE).exists():
            self._drafter = JsonLines(directory / DRAFTER_FILE, last_step=last_step)
        self._trace = TraceFile(directory / TRACE_FILE, last_step=last_step)

    def write(self, step: int, metrics: Mapping[str, float], record: StepRecord) -> None:
        """Write one step: metrics, rollouts, speculation and costs."""
        for each in record.rounds:
            self.log(each.rollout.logged(step, TRAINING))
        for rollout in record.rollouts if self._keeps_rollouts else ():
            self._rollouts.write(step, rollout_row(rollout))
        if self._keeps_rollouts and record.series is not None:
            self._write_drafts(step, record)
        if (costs := record.rounds[-1].rollout.costs) is not None:
            cost_file.save_costs(self._directory / cost_file.FILE, costs)
        self._metrics.write(step, metrics)

    def log(self, rollouts: Iterable[LoggedRollout]) -> None:
        """Write the speculation of a rollout, one line per worker."""
        for rollout in rollouts:
            if self._speculation is None:
                self._speculation = self._open_speculation(rollout.step)
            self._speculation.write(rollout.step, rollout.as_json())

    def _write_drafts(self, step: int, record: StepRecord) -> None:
        """Write which characters of the step's texts were drafted."""
        if self._drafts is None:
            self._drafts = self._open_drafts(step)
        parts = [each.rollout.drafted for each in record.rounds]
        drafted = {name: places for part in parts for name, places in part.items()}
        self._drafts.write(step, {"drafted": drafted})

    def _open_drafts(self, last_step: int | None) -> JsonLines:
        path = self._directory / DRAFTS_FILE
        return JsonLines(path, last_step=last_step, most_bytes=self._max_bytes)

    def _open_speculation(self, last_step: int | None) -> JsonLines:
        path = self._directory / rollout_log.FILE
        return JsonLines(path, last_step=last_step, most_bytes=self._max_bytes)

    def log_workers(self, step: int, states: Timeline, decisions: Sequence[Decision]) -> None:
        """Write the states of the workers in a step, and the decisions about the drafter."""
        self.trace(step, states)
        for decision in decisions:
            if self._drafter is None:
                self._drafter = JsonLines(self._directory / DRAFTER_FILE, last_step=step)
            self._drafter.write(step, asdict(decision))

    def trace(self, step: int, states: Timeline) -> None:
        """Write the states of the workers in a step, or before it."""
        self._trace.append(step, states)

    def close(self) -> None:
        """Close all files."""
        drafts = (self._speculation, self._drafts, self._drafter)
        for file in (self._metrics, self._rollouts, self._trace, *drafts):
            if file is not None:
                file.close()
