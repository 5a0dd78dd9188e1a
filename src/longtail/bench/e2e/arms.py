"""An arm of `longtail bench e2e`: a whole training run in progress, and its figures."""

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.assembly.models import model_directory
from longtail.cluster.placement import LengthHistory
from longtail.cluster.timeline import Timeline
from longtail.config import files as configfile
from longtail.config.rl import RunConfig
from longtail.engine import rollout_log
from longtail.engine.rollout_log import RolloutSeries
from longtail.loop import Trainer
from longtail.model.hf.model import load_model
from longtail.rl.grading.pool import GraderPool
from longtail.run.checkpoint import RunDirectory, save_tensors
from longtail.run.console import Console
from longtail.run.drafter_store import DrafterStore
from longtail.tuner import cost_file
from longtail.tuner.cost import CostModel

OFF, HISTORY, FROZEN, SERIAL = "off", "history", "frozen", "serial"
SPOT, COLD, UNPLACED = "spot", "cold", "unplaced"
ACCEPT = "speculation/accept_length"
_SAVES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveTimes:
    """Seconds that saving the drafter blocks a run.

    Example: SaveTimes(own_s=0.001, full_s=0.02)
    """

    own_s: float
    """The drafter's own weights and texts, written in the background."""
    full_s: float
    """Everything with optimizer, embedding and head, waited for until it is on disk."""


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """Figures of one arm's steps."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Completions by request."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each completion."""
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """Lines of rollouts.jsonl."""
    series: list[RolloutSeries] = field(default_factory=list)
    """Steps of each rollout that speculated."""
    costs: CostModel | None = None
    """Cost model at the end of the run."""
    saves: list[SaveTimes] = field(default_factory=list)
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

    Lifecycle: `step`, or between two steps `park` and `unpark`; `finish` after the last; `close`.
    """

    def __init__(self, name: str, config: RunConfig) -> None:
        self.name, self.result, self._config = name, ArmResult(), config
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
        if self.name == UNPLACED:
            self._trainer.workers.lengths = LengthHistory()
        metrics = self._trainer.make_step()
        self.result.metrics.append(metrics)
        self.result.timeline = self._trainer.timeline
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

    def finish(self, *, times_saves: bool) -> None:
        """Record the policy, and the time of checkpoints of the drafter if it was trained."""
        self.result.policy = self._trainer.workers.policy_digest()
        if times_saves and self.name == SPOT and self._trainer.workers.published is not None:
            target = load_model(model_directory(self._config.model.path))
            frozen = {"embedding": target.embedding.weight, "head": target.head.weight}
            self.result.saves = [self._save(frozen) for _ in range(_SAVES)]

    def close(self) -> ArmResult:
        """End the run and read its files."""
        self._trainer.close()
        self._grader.close()
        self._run.close()
        rows = self.result.rollouts = _lines(self._place / "rollouts.jsonl")
        self.result.texts = {row["request_id"]: row["text"] for row in rows}
        self.result.lengths = [row["num_tokens"] for row in rows]
        if (self._place / rollout_log.FILE).exists():
            logged = _lines(self._place / rollout_log.FILE)
            self.result.series = [RolloutSeries.of_json(row) for row in logged]
            self.result.costs = cost_file.load_costs(self._place / cost_file.FILE)
        return self.result

    def _save(self, frozen: Mapping[str, Tensor]) -> SaveTimes:
        """Time a save of the drafter both ways; `frozen` are the target's parts of a full one."""
        store, began = DrafterStore(self._place / "saves"), time.perf_counter()
        state = self._trainer.workers.drafter_state()
        assert state is not None, "a drafter is published"
        store.save(1, state)
        own_s = time.perf_counter() - began
        store.wait()
        moments = {f"{name}/{k}": each for name, each in state.drafter().items() for k in "mv"}
        began = time.perf_counter()
        path = self._place / "full.safetensors"
        save_tensors({**state.tensors, **moments, **frozen}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return SaveTimes(own_s=own_s, full_s=time.perf_counter() - began)


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Return the share of the texts that differ."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
