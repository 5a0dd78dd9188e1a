"""The arms of `longtail bench e2e`: whole training runs that differ in how they draft.

    off        plain decoding
    history    suffixes of earlier texts, no weights (TLT-Base)
    frozen     the drafter as trained before the run
    serial     trained after each rollout while all workers wait; its time counts
    spot       trained by workers that have finished, while the others still write
    cold       the same, from a drafter with random weights
    unplaced   as spot, but repeated prompts are placed as if their lengths were unknown

All arms have the same seeds, so they write the same texts and learn the same: only times differ.
They take turns, a step each, in one run.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.bench.common.grown import LARGE, grow_drafter, grow_target
from longtail.bench.common.process import Log
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.e2e.task import write_prompts
from longtail.build.models import TINY_REASONER, model_directory
from longtail.cluster.placement import LengthHistory
from longtail.cluster.timeline import Timeline
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.drafter.formats.checkpoint import identity, load_drafter, save_drafter
from longtail.engine import rollout_log
from longtail.engine.rollout_log import RolloutSeries
from longtail.loop import Trainer
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.grading.pool import GraderPool
from longtail.run.checkpoint import RunDirectory, save_tensors
from longtail.run.console import Console
from longtail.run.drafter_store import DrafterStore
from longtail.tiny import drafter as tiny_drafter
from longtail.tuner import cost_file
from longtail.tuner.cost import CostModel

OFF, SPOT, COLD, UNPLACED = "off", "spot", "cold", "unplaced"
_SAVES = 5
ACCEPT = "speculation/accept_length"
ARMS: Mapping[str, tuple[str, ...]] = {
    OFF: ("--speculation.drafter=none", "--spot.train=never"),
    "history": ("--speculation.drafter=history", "--spot.train=never"),
    "frozen": ("--spot.train=never",),
    "serial": ("--spot.train=serial",),
    SPOT: ("--spot.train=spot",),
    COLD: ("--spot.train=spot", "--spot.learning_rate=0.01", "--spot.matrix_rate=0.03"),
    UNPLACED: ("--spot.train=spot",),
}
"""Configuration of each arm; `cold` learns at the rates of the embedded drafter's training."""


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
    series: list[RolloutSeries] = field(default_factory=list)
    """Steps of each rollout that speculated."""
    costs: CostModel | None = None
    """Cost model at the end of the run."""
    saves: list[SaveTimes] = field(default_factory=list)
    timeline: Timeline | None = None
    """Timeline of the last step."""

    def column(self, name: str) -> list[float]:
        """Return one metric of every step; 0 where a step lacks it."""
        return [row.get(name, 0.0) for row in self.metrics]


@final
class Arm:
    """A run in progress, in a directory of its own."""

    def __init__(self, name: str, place: Path, words: Sequence[str], model: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        words = [*words, *ARMS[name], f"--run.dir={place / 'run'}"]
        if name == COLD:
            words.append(f"--speculation.drafter={_random_drafter(model, place / 'drafter')}")
        place, self._model = place / "run", model
        own = config.load(configfile.locate("quickstart"), words)
        self.name, self.result, self._place = name, ArmResult(), place
        self._run = RunDirectory(place)
        self._run.start(configfile.render(own), resume=False)
        self._grader = GraderPool(
            own.reward.name,
            workers=own.reward.workers,
            timeout_s=own.reward.timeout_s,
            by_group=own.reward.per == "group",
        )
        self._trainer = Trainer(own, self._run, None, self._grader, Console())
        self._trainer.begin()

    def advance(self) -> dict[str, float]:
        """Train one step and return its metrics."""
        if self.name == UNPLACED:
            self._trainer.workers.lengths = LengthHistory()
        metrics = self._trainer.advance()
        self.result.metrics.append(metrics)
        self.result.timeline = self._trainer.timeline
        return metrics

    def close(self) -> ArmResult:
        """End the run and read its files."""
        if self.name == SPOT and self._trainer.workers.published is not None:
            target = load_model(self._model)
            frozen = {"embedding": target.embedding.weight, "head": target.head.weight}
            self.result.saves = [self._save(frozen) for _ in range(_SAVES)]
        self._trainer.close()
        self._grader.close()
        self._run.close()
        rows = _lines(self._place / "rollouts.jsonl")
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


def measure(
    options: E2eBenchOptions, place: Path, log: Log, *overrides: str
) -> dict[str, ArmResult]:
    """Train all arms in turn, a step each; `overrides` add to the configuration of all."""
    model = model_directory(TINY_REASONER)
    words = (*options.overrides, *overrides)
    if options.model != "tiny":
        model, drafter = grow(model, place)
        words = (f"--model.path={model}", f"--speculation.drafter={drafter}", *words)
    if options.switch_task is not None:
        words = (f"--data.source={write_prompts(place, options)}", *words)
    arms: list[Arm] = []
    try:
        for name in options.arms:
            arms.append(Arm(name, place / name, words, model))
        for step in range(1, options.steps + 1):
            seconds = []
            for arm in arms if step % 2 else arms[::-1]:  # forward, then backward
                metrics = arm.advance()
                seconds.append(f"{arm.name} {metrics['timing_s/step']:.1f} s")
            log(f"step {step}/{options.steps}: {', '.join(sorted(seconds))}")
    finally:
        found = {arm.name: arm.close() for arm in arms}
    return found


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Return the share of the texts that differ."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)


def grow(small: Path, place: Path) -> tuple[Path, Path]:
    """Write the tiny reasoner and its drafter, grown to 100M parameters, as directories."""
    tokenizer, model = load_tokenizer(small), load_model(small)
    loaded = load_drafter(tiny_drafter.ensure(small), model, tokenizer, strict_weights=False)
    target = grow_target(model, LARGE)
    save_model(target, place / "model", eos_ids=tokenizer.eos_ids)
    tokenizer.save(place / "model")
    layer = grow_drafter(loaded.layer, LARGE)
    own = identity(str(place / "model"), target, tokenizer)
    save_drafter(place / "drafter", layer, loaded.draft_ids, own, loaded.training)
    return place / "model", place / "drafter"


def _random_drafter(model: Path, place: Path) -> Path:
    """Write a drafter with random weights."""
    plan = replace(tiny_drafter.PLANS["eagle1"], problems=4, heldout=1, steps=0)
    tiny_drafter.train(plan, model, place)
    return place


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
