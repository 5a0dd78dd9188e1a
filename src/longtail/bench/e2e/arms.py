"""An arm of `longtail bench e2e`: a whole training run in progress, and its figures."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from longtail.cluster.states import State
from longtail.cluster.timeline import Timeline
from longtail.config import files as configfile
from longtail.config.rl import RunConfig
from longtail.loop import Trainer
from longtail.rl.grading.pool import GraderPool
from longtail.run.checkpoint import RunDirectory
from longtail.run.console import Console

ACCEPT = "speculation/accept_length"


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """Figures of one arm's steps."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    worker_s: list[tuple[float, ...]] = field(default_factory=list)
    """Seconds in which each worker generated, step by step."""
    texts: dict[str, str] = field(default_factory=dict)
    """Completions by request."""
    timeline: Timeline | None = None
    """Timeline of the last step."""
    policy: str = ""
    """Digest of the weights after the last step."""

    def column(self, name: str) -> list[float]:
        """Return one metric of every step; 0 where a step lacks it."""
        return [row.get(name, 0.0) for row in self.metrics]


@final
class Arm:
    """A run in progress, in the directory of its configuration.

    Lifecycle: `step`, or between two steps `park` and `unpark`; `close` after the last.
    """

    def __init__(self, name: str, config: RunConfig) -> None:
        self.name, self.result = name, ArmResult()
        self._place = Path(config.run.dir)
        shutil.rmtree(self._place, ignore_errors=True)
        self._run = RunDirectory(self._place)
        self._run.start(configfile.render(config), resume=False)
        self._grader = GraderPool(
            config.reward.name,
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
            by_group=config.reward.per == "group",
        )
        try:
            console = Console(f"bench e2e: arm {name}: ")
            self._trainer = Trainer(config, self._run, None, self._grader, console)
        except BaseException:
            self._grader.close()
            self._run.close()
            raise
        self._trainer.begin()

    def step(self) -> dict[str, float]:
        """Train one step and return its metrics; no held-out prompt is evaluated."""
        metrics = self._trainer.make_step()
        self.result.metrics.append(metrics)
        self.result.timeline = timeline = self._trainer.timeline
        assert timeline is not None, "a step was made"
        self.result.worker_s.append(generating_s(timeline))
        return metrics

    def park(self) -> None:
        """Free most of its memory until `unpark`, which is called before the next step."""
        self._trainer.workers.park(self._parked)

    def unpark(self) -> None:
        """Take the memory back."""
        self._trainer.workers.unpark(self._parked)
        self._parked.unlink()

    @property
    def _parked(self) -> Path:
        return self._place / "parked"

    def finish(self) -> None:
        """Record the policy after the last step, before the arm is parked."""
        self.result.policy = self._trainer.workers.policy_digest()

    def close(self) -> ArmResult:
        """End the run and read its texts."""
        self._trainer.close()
        self._grader.close()
        self._run.close()
        rollouts = self._place / "rollouts.jsonl"
        if rollouts.exists():
            lines = rollouts.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            self.result.texts = {row["request_id"]: row["text"] for row in rows}
        return self.result


def generating_s(timeline: Timeline) -> tuple[float, ...]:
    """Return the seconds in which each worker generated."""
    return tuple(
        sum(
            span.seconds
            for span in timeline.spans
            if span.worker == worker and span.state is State.GENERATING
        )
        for worker in timeline.workers
    )


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Return the share of the texts that differ, of those that both arms wrote."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)
