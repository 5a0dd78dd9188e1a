"""The arms of `longtail bench e2e`: whole training runs, which differ in how they draft and idle.

    off        plain decoding
    single     the same by one worker with the threads of all, where several share a CPU
    frozen     the drafter as trained before the run
    spot       the same drafter, which learns during the run
    cold       a fresh drafter, history and phrases, which learn: `auto` where none was trained
    all        spot, or cold without a trained drafter, and idle workers learn from finished groups

All arms have the same seeds, so they write the same texts and learn the same: only times differ.
(`single` has other threads, so its updates round otherwise.) Speedups are over the faster of the
two that decode plainly.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from longtail.assembly import drafters
from longtail.assembly.precision import decided, run_device
from longtail.bench.options import ARMS, E2eBenchOptions
from longtail.cluster.workers.states import Timeline
from longtail.config import files as configfile
from longtail.config.rl import RunConfig, load
from longtail.errors import ConfigError
from longtail.loop import Trainer
from longtail.rl.grading.pool import GraderPool
from longtail.run.checkpoint import RunDirectory
from longtail.run.console import Console
from longtail.system.device import threads_each

OFF, FROZEN, SPOT, COLD, ALL = ARMS
SINGLE = "single"
"""Added by the bench itself: the best plain baseline."""
ACCEPT = "speculation/accept_length"
_DRAFTERS = {
    OFF: drafters.NONE,
    SINGLE: drafters.NONE,
    COLD: "+".join((drafters.FRESH, *drafters.WEIGHTLESS)),
}
"""Drafters of arms that do not begin with the run's."""
_TRAINED = (FROZEN, SPOT)
"""Arms that begin with a drafter trained before the run."""
_RUN_WORDS = ("--run.save_rollouts=true", "--run.writers=")
"""Logs that the figures need; nothing is sent to the user's own trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The runs that are compared, and how long."""

    arms: Mapping[str, RunConfig]
    """Configuration of each arm, the arm off first."""
    steps: int


def make_comparison(options: E2eBenchOptions, place: Path) -> Comparison:
    """Return the arms of a run, each in a directory below `place`.

    Raises ConfigError if the run never drafts, or has no trained drafter for an arm that needs one.
    """
    path = configfile.locate(options.run)
    given = [f"--speculation.drafter={options.drafter}"] if options.drafter else []
    words = (*options.overrides, *_RUN_WORDS, *given)
    own = load(path, words)
    if own.speculation.tuner == "off":
        raise ConfigError(
            "speculation.tuner = 'off': no arm would draft; leave it out, or set 'budget'"
        )
    names = options.arms
    if own.cluster.workers > 1 and not own.cluster.address and run_device(own).type == "cpu":
        names = (OFF, SINGLE, *names[1:])
    is_trained = _has_trained_drafter(own)
    if not is_trained and (untrained := [name for name in names if name in _TRAINED]):
        raise ConfigError(
            f"--arms = {','.join(options.arms)}: {', '.join(untrained)} needs a trained drafter, "
            f"and speculation.drafter = {own.speculation.drafter!r} is none for {own.model.path}; "
            "train one with `longtail drafter train`, then give --drafter DIR"
        )
    return Comparison(
        arms={
            name: decided(
                load(path, [*words, *_words(name, is_trained, own), f"--run.dir={place / name}"])
            )
            for name in names
        },
        steps=min(options.steps, own.run.steps),
    )


def _words(name: str, is_trained: bool, own: RunConfig) -> list[str]:
    """Return the configuration of an arm, on top of the run's."""
    drafter = _DRAFTERS.get(name if is_trained or name in _DRAFTERS else COLD)
    return [
        *([f"--speculation.drafter={drafter}"] if drafter else []),
        *([] if name == ALL else ["--learner.streaming=false"]),
        f"--spot.train={'never' if name in (OFF, SINGLE, FROZEN) else 'spot'}",
        *(_one_worker(own) if name == SINGLE else []),
    ]


def _one_worker(own: RunConfig) -> list[str]:
    """Return the configuration of one worker with the threads and the places of all."""
    workers = own.cluster.workers
    return [
        "--cluster.workers=1",
        "--cluster.min_workers=0",
        f"--run.threads={workers * threads_each(own.run.threads, workers)}",
        f"--rollout.max_running={workers * own.rollout.max_running}",
    ]


def _has_trained_drafter(own: RunConfig) -> bool:
    """Return whether a run begins with a trained drafter; ConfigError for one that is nowhere."""
    drafters.check_names(own.speculation.drafter)
    names = drafters.drafter_names(own.speculation.drafter, own.model.path, learns=True)
    return any(drafters.located(name)[1] is not None for name in names)


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
        """End the run and read its texts."""
        self._trainer.close()
        self._grader.close()
        self._run.close()
        lines = (self._place / "rollouts.jsonl").read_bytes().splitlines()
        rows = [json.loads(line) for line in lines]
        self.result.texts = {row["request_id"]: row["text"] for row in rows}
        return self.result


def differing_share(one: ArmResult, other: ArmResult) -> float:
    """Return the share of the texts that differ, of those that both arms wrote."""
    both = one.texts.keys() & other.texts.keys()
    return sum(one.texts[name] != other.texts[name] for name in both) / max(len(both), 1)
