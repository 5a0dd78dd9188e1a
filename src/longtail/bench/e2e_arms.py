"""The arms of `longtail bench e2e`: whole training runs that differ in how they draft.

    off        plain decoding
    history    suffixes of what was written, no weights (TLT-Base)
    frozen     the drafter that was trained before, never again
    serial     trained after each rollout, while all others wait; its time counts
    spot       trained by workers that are done, while the others still write
    cold       the same from a drafter that was never trained

All arms have the same seeds, so they write the same texts and learn the same: only the clock may
differ. They take turns, a step each, in one run.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch

from longtail import config
from longtail.assemble import TINY_REASONER, model_directory
from longtail.checkpoint import RunDirectory
from longtail.cluster.timeline import Timeline
from longtail.console import Console
from longtail.drafter.checkpoint import TrainingRecord, identity, save_drafter
from longtail.drafter.eagle import EagleConfig
from longtail.drafter.fresh import fresh_drafter
from longtail.drafter.texts import pack_texts
from longtail.loop import Trainer
from longtail.model import hf
from longtail.rl.examples import Example
from longtail.rl.grading import GraderPool
from longtail.tiny import task
from longtail.tiny.drafter import LESSONS

OFF, COLD = "off", "cold"
ARMS: Mapping[str, tuple[str, ...]] = {
    OFF: ("--speculation.drafter=none", "--spot.train=never"),
    "history": ("--speculation.drafter=history", "--spot.train=never"),
    "frozen": ("--spot.train=never",),
    "serial": ("--spot.train=serial",),
    "spot": ("--spot.train=spot",),
    COLD: ("--spot.train=spot", "--spot.learning_rate=0.01", "--spot.matrix_rate=0.03"),
}
"""A drafter that knows nothing learns at the rates with which the embedded one was taught."""


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """What one arm's steps were."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """What was written, by request."""
    timeline: Timeline | None = None
    """Of the last step."""

    def column(self, name: str) -> list[float]:
        """Return one number of every step; 0 where it was not there."""
        return [row.get(name, 0.0) for row in self.metrics]


@final
class Arm:
    """A run in progress, in a directory of its own."""

    def __init__(self, name: str, place: Path, words: Sequence[str]) -> None:
        shutil.rmtree(place, ignore_errors=True)
        words = [*words, *ARMS[name], f"--run.dir={place / 'run'}"]
        if name == COLD:
            words.append(f"--speculation.drafter={_untaught(place / 'drafter')}")
        place = place / "run"
        own = config.load(None, words)
        self.name, self.result, self._place = name, ArmResult(), place
        self._run = RunDirectory(place)
        self._run.start(config.dump(own), resume=False)
        self._grader = GraderPool(
            own.reward.name, workers=own.reward.workers, timeout_s=own.reward.timeout_s
        )
        self._trainer = Trainer(own, self._run, None, self._grader, Console())
        self._trainer.begin()

    def advance(self) -> dict[str, float]:
        """Make a step."""
        metrics = self._trainer.advance()
        self.result.metrics.append(metrics)
        self.result.timeline = self._trainer.timeline
        return metrics

    def close(self) -> ArmResult:
        """End the run and read what it wrote."""
        self._trainer.close()
        self._grader.close()
        self._run.close()
        self.result.texts = _texts(self._place / "rollouts.jsonl")
        return self.result


def measure(
    arms: Sequence[str], place: Path, words: Sequence[str], steps: int, say: Callable[[str], None]
) -> dict[str, ArmResult]:
    """Let all arms make so many steps, in turn."""
    running: list[Arm] = []
    try:
        for name in arms:
            running.append(Arm(name, place / name, words))
        for step in range(1, steps + 1):
            took = []
            # Forward, then backward: who goes first is not always the same.
            for arm in running if step % 2 else running[::-1]:
                metrics = arm.advance()
                took.append(f"{arm.name} {metrics['timing_s/step']:.1f} s")
            say(f"step {step}/{steps}: {', '.join(sorted(took))}")
    finally:
        found = {arm.name: arm.close() for arm in running}
    return found


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Share of the texts that differ."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)


def _untaught(place: Path) -> Path:
    """Write a drafter of the embedded model with random weights."""
    directory = model_directory(TINY_REASONER)
    target, tokenizer = hf.load_model(directory, torch.float32), hf.load_tokenizer(directory)
    prompts = [tokenizer.chat(row["prompt"]) for row in task.problems(16, 0, "train")]
    sample = pack_texts([Example(tokens=tokens, prompt_len=1) for tokens in prompts], 4096)[0]
    lessons = LESSONS["eagle1"]
    layer = fresh_drafter(
        EagleConfig(recipe="eagle1", target=target.config, layers=(), window=lessons.window),
        target,
        sample,
        torch.Generator().manual_seed(0),
    )
    record = TrainingRecord(steps=0, tokens=0, unroll_steps=lessons.unroll_steps)
    save_drafter(place, layer, None, identity(TINY_REASONER, target, tokenizer), record)
    return place


def _texts(path: Path) -> dict[str, str]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row["request_id"]: row["text"] for row in rows}
