"""What a run writes down after every step: metrics.jsonl, its further writers, rollouts.jsonl.

Lines of a step are written once, whole, in rising order; a resumed run cuts back to its checkpoint
first. What the numbers mean is `step_metrics`' business.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from longtail.config import RunConfig
from longtail.metrics import JsonLines, open_writers
from longtail.step_metrics import rollout_row
from longtail.types import Rollout


class Journal:
    """Open from the first step of a sitting to its last; `last_step` is the checkpoint's."""

    def __init__(self, config: RunConfig, directory: Path, *, last_step: int | None) -> None:
        self._keeps_rollouts = config.run.save_rollouts
        self._metrics = open_writers(
            config.run.writers, directory, last_step=last_step, config=config.model_dump()
        )
        self._rollouts = JsonLines(directory / "rollouts.jsonl", last_step=last_step)

    def write(self, step: int, metrics: Mapping[str, float], rollouts: Sequence[Rollout]) -> None:
        """Keep one step. Raises CheckpointError when the disk refuses."""
        for rollout in rollouts if self._keeps_rollouts else ():
            self._rollouts.append(step, rollout_row(rollout))
        self._metrics.write(step, metrics)

    def close(self) -> None:
        """Write out what is pending."""
        self._metrics.close()
        self._rollouts.close()
