"""The arms of `longtail bench e2e`: the same run with drafting and without.

    off        plain decoding; idle workers rest
    single     the same by one worker with the threads of all, where several share a CPU
    on         the run as it is configured

All arms have the same seeds, so they write the same completions and learn the same: only times
differ. (`single` has other threads, so its updates round otherwise.) Speedups are over the faster
of the two that decode plainly.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from longtail.assembly.drafters import NONE, check_names
from longtail.assembly.precision import decided, run_device
from longtail.cluster.workers.states import Timeline
from longtail.config import files as configfile
from longtail.config.command_options import E2eBenchOptions
from longtail.config.rl import RunConfig, load
from longtail.errors import ConfigError
from longtail.loop import Trainer
from longtail.rl.grading.pool import GraderPool
from longtail.run.checkpoint import RunDirectory
from longtail.run.console import Console
from longtail.system.device import threads_each

OFF, SINGLE, ON = "off", "single", "on"
_PLAIN = (f"--speculation.drafter={NONE}", "--spot.train=never", "--learner.streaming=false")
_RUN_WORDS = ("--run.save_rollouts=true", "--run.writers=")
"""Logs that the figures need; nothing is sent to the user's own trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs that are compared, and how long."""

    arms: Mapping[str, RunConfig]
    """Configuration of each arm, the arm off first and the arm on last."""
    steps: int


def make_comparison(options: E2eBenchOptions, place: Path) -> Comparison:
    """Return the arms of a run, each in a directory below `place`.

    Raises ConfigError if the run never drafts.
    """
    path, words = configfile.locate(options.run), (*options.overrides, *_RUN_WORDS)
    own = load(path, words)
    for key, never in (("tuner", "off"), ("drafter", NONE)):
        if getattr(own.speculation, key) == never:
            raise ConfigError(f"speculation.{key} = {never!r}: no arm would draft; leave it out")
    check_names(own.speculation.drafter)
    arms: dict[str, tuple[str, ...]] = {OFF: _PLAIN}
    if own.cluster.workers > 1 and not own.cluster.address and run_device(own).type == "cpu":
        arms[SINGLE] = (*_PLAIN, *_one_worker(own))
    arms[ON] = ()
    configs = {
        name: load(path, [*words, *differing, f"--run.dir={place / name}"])
        for name, differing in arms.items()
    }
    return Comparison(
        arms={name: decided(config) for name, config in configs.items()},
        steps=min(options.steps, own.run.steps),
    )


def _one_worker(own: RunConfig) -> tuple[str, ...]:
    """Return the configuration of one worker with the threads and the places of all."""
    workers = own.cluster.workers
    return (
        "--cluster.workers=1",
        "--cluster.min_workers=0",
        f"--run.threads={workers * threads_each(own.run.threads, workers)}",
        f"--rollout.max_running={workers * own.rollout.max_running}",
    )


@dataclass(slots=True, kw_only=True)
class ArmResult:
    """Figures of one arm's steps."""

    metrics: list[dict[str, float]] = field(default_factory=list)
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
    """A run in progress, in the directory of its configuration. Lifecycle: step* -> close."""

    def __init__(self, name: str, config: RunConfig) -> None:
        self.name, self.result = name, ArmResult()
        self._place = Path(config.run.dir)
        shutil.rmtree(self._place, ignore_errors=True)
        self._run = RunDirectory(self._place)
        self._run.start(configfile.render(config), resume=False)
        self._grader = GraderPool(config.reward)
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
        self.result.timeline = self._trainer.timeline
        return metrics

    def finish(self) -> None:
        """Record the policy after the last step."""
        self.result.policy = self._trainer.workers.policy_digest()

    def close(self) -> ArmResult:
        """End the run and read its completions."""
        self._trainer.close()
        self._grader.close()
        self._run.close()
        lines = (self._place / "rollouts.jsonl").read_bytes().splitlines()
        rows = [json.loads(line) for line in lines]
        self.result.texts = {row["request_id"]: row["text"] for row in rows}
        return self.result


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Return the fraction of the completions that differ, of those that both arms wrote."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)
