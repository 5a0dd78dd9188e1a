"""The loop of `longtail sft` and `longtail drafter train`: steps, checkpoints, metrics, resume."""

import abc
import time
from collections.abc import Callable
from pathlib import Path

from longtail.assembly.precision import costs
from longtail.config import files as configfile
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.sft import SftConfig
from longtail.drafter.kind import LayerTrainer
from longtail.rl.sft_learner import SftLearner
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.run.metrics_log import MetricLog
from longtail.system.device import set_threads
from longtail.system.interrupt import Interrupted, Interruption


class Training(abc.ABC):
    """Model, batches and held-out data of a training program."""

    trainer: SftLearner | LayerTrainer
    about: tuple[str, ...]
    """Lines for the console: what is trained on what, and which data are left out."""

    @property
    def steps(self) -> int:
        """Number of updates made."""
        return self.trainer.steps

    @property
    @abc.abstractmethod
    def total_steps(self) -> int:
        """Number of updates after which training ends."""

    @abc.abstractmethod
    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore model, optimizer and data cursor."""

    @abc.abstractmethod
    def step(self) -> dict[str, float]:
        """Make one update and return its metrics, among them `train/tokens`."""

    @abc.abstractmethod
    def measure(self) -> dict[str, float]:
        """Measure on held-out data; {} if there is none."""

    @abc.abstractmethod
    def save(self, directory: RunDirectory) -> None:
        """Write a checkpoint, with the measurement of this step if there is one."""

    @abc.abstractmethod
    def lines(self, metrics: dict[str, float], *, is_due: bool) -> list[str]:
        """Return the console lines of a step; the usual one only if it is due."""

    @abc.abstractmethod
    def log_end(self, console: Console, policy: Path) -> None:
        """Print the result and its path."""


def run(
    config: SftConfig | DrafterTrainConfig,
    assemble: Callable[[RunDirectory, Checkpoint | None, Console], Training],
) -> int:
    """Train to the last step, resuming from the newest checkpoint; 130 if interrupted."""
    console = Console()
    set_threads(config.run.threads)
    with RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints) as directory:
        checkpoint = directory.start(configfile.render(config), resume=config.run.resume)
        try:
            with console.phase("preparing model and data"):
                training = assemble(directory, checkpoint, console)
        except Interrupted:
            console.log("stopped before the first step; start again to go on")
            return 130
        if checkpoint is not None:
            training.restore(checkpoint)
            if training.steps >= training.total_steps:
                more = "; raise train.steps to go on"
                is_given = training.total_steps == config.train.steps
                console.log(f"{checkpoint.policy}: its steps are done{more if is_given else ''}")
                return 0
        first = f", resumed after step {training.steps}" if training.steps else ""
        title, *others = training.about
        for line in (f"{title}, run directory {config.run.dir}{first}", *costs(config), *others):
            console.log(line)
        return _train(config, directory, training, console)


def _train(
    config: SftConfig | DrafterTrainConfig,
    directory: RunDirectory,
    training: Training,
    console: Console,
) -> int:
    """Step until all steps are done or the user interrupts, and end with a checkpoint."""
    own, steps, began = config.run, training.total_steps, time.perf_counter()
    first = saved = training.steps
    tokens = 0.0
    writer = MetricLog(
        own.writers,
        directory.path,
        last_step=saved or None,
        config=config.model_dump(mode="json"),
    )
    directory.write_config()
    interruption = Interruption()
    try:
        with interruption, console.phase("training", total=steps - first):
            while training.steps < steps:
                interruption.check()
                console.count(training.steps - first)
                metrics = training.step()
                step, tokens = training.steps, tokens + metrics["train/tokens"]
                metrics["perf/tokens_per_s"] = tokens / (time.perf_counter() - began)
                if step % own.checkpoint_every == 0 or step == steps:
                    with console.phase("measuring and writing a checkpoint"):
                        metrics |= training.measure()
                        training.save(directory)
                    saved = step
                writer.write(step, metrics)
                is_due = step % own.log_every == 0 or step == steps
                for line in training.lines(metrics, is_due=is_due):
                    console.log(line)
    except Interrupted:
        if saved < training.steps:
            training.save(directory)
        console.log(f"stopped after step {training.steps}; start again to go on")
        return 130
    finally:
        writer.close()
    training.log_end(console, directory.checkpoints / f"step_{steps:06d}" / "policy")
    return 0


def step_label(step: int, steps: int) -> str:
    """Return the beginning of a step's line, aligned."""
    return f"step {step:>{len(str(steps))}}/{steps}"
