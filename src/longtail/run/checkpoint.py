"""The run directory and its checkpoints; a checkpoint is on disk completely or not at all.

    runs/example/
      config.toml                     resolved configuration, of the newest start
      metrics.jsonl, rollouts.jsonl   logs, as speculation.jsonl; cut back on resume
      checkpoints/
        step_000010/
          policy/                     a Hugging Face directory, written by `save_policy`
          trainer.safetensors         optimizer moments, master weights, generator states
          state.json                  counters and cursors; digests of all files, and its own
        .new-step_000020/             being written; removed at the next start
      earlier-1/                      logs of an earlier run without a checkpoint

A checkpoint is written under a temporary name, synced, and renamed; it gets a temporary name again
before it is removed. So one with its own name is complete. What reads it compares the digests;
of a damaged checkpoint nothing is used, and the one before is taken. Nothing is unpickled.
"""

import fcntl
import itertools
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.config import files as configfile
from longtail.errors import SPACE, CheckpointError, ConfigError
from longtail.run.state_file import RUN_FORMAT, damaged, read_state, write_state
from longtail.system import tensor_files
from longtail.system.files import (
    read_file,
    remove_folder,
    replace_folder,
    write_atomically,
    writing,
)

_log = logging.getLogger("longtail")
_POLICY = "policy"
_NAME = re.compile(r"step_(\d{6,18})")
_MAY_DIFFER = frozenset(
    {
        "run.dir", "run.steps", "run.threads", "run.checkpoint_every", "run.keep_checkpoints",
        "run.resume", "run.save_rollouts", "run.writers", "run.log_every",
        "train.steps", "eval.samples", "eval.every", "reward.workers", "reward.timeout_s",
        "speculation.drafter", "speculation.tuner", "speculation.depth", "speculation.width",
        "speculation.size", "speculation.max_running", "speculation.coupled", "spot.train",
        "spot.learning_rate", "spot.matrix_rate", "spot.batch_tokens", "spot.buffer_mb",
        "spot.features_mb", "cluster.workers", "cluster.min_workers", "cluster.address",
        "cluster.worker_timeout_s", "learner.sharding", "learner.streaming",
    }
)  # fmt: skip
"""Fields that a resumed run may change; none affects a weight, unless a schedule uses it."""

CONFIG_FILE = "config.toml"
_LOGS = (
    "metrics.jsonl", "rollouts.jsonl", "speculation.jsonl", "drafts.jsonl", "drafter.jsonl",
    "trace.json", "summary.json", "report.html", "drafter", "tensorboard",
)  # fmt: skip


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into CPU memory. Raises CheckpointError if it is damaged."""
    try:
        return tensor_files.read(path)
    except ConfigError as error:
        raise damaged(path.parent, error) from error


def put_step(folder: Path, step: int, write: Callable[[Path], None], *, keep: int) -> None:
    """Write a checkpoint, whole or not at all; keep only the newest ones up to it.

    Later ones are those that a resume has passed over, because they are damaged.
    """
    replace_folder(folder / f"step_{step:06d}", write)
    found = steps_in(folder)
    kept = [path for number, path in found if number <= step][-keep:]
    for _, path in found:
        if path not in kept:
            remove_folder(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """JSON values; floats are exact."""
    begun: str = ""
    """Local time of the run's first start, in ISO format."""
    run_format: int | None = RUN_FORMAT
    """`RUN_FORMAT` of the writer; None if it recorded none."""

    @property
    def policy(self) -> Path:
        """The Hugging Face directory of the policy."""
        return self.path / _POLICY

    def tensors(self) -> dict[str, Tensor]:
        """Read the trainer's tensors."""
        return load_tensors(self.path / "trainer.safetensors")


@final
class RunDirectory(AbstractContextManager["RunDirectory"]):
    """Directory of a run: `start` locks it for this process, `save` adds checkpoints.

    Lifecycle:  with RunDirectory(path) as run: start -> save, save, ...
    `load_latest` needs no start.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._keep = keep
        self._config_text = ""
        self.begun = datetime.now()
        """Local time of the run's first start, which a chat template may write into prompts."""
        self._lock: int | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, config_text: str, *, resume: bool) -> Checkpoint | None:
        """Lock the directory and return the checkpoint to resume, if any.

        Nothing of a run that is resumed is changed before `write_config`. Without a checkpoint,
        config.toml is written, and earlier logs are moved to `earlier-N` with a warning. Raises
        ConfigError if the directory is used and `resume` is off, if it is locked, if its run is of
        another version of longtail, or if the configuration changes the run; CheckpointError if no
        checkpoint is whole.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._claim()
            latest = self._resume_point(config_text, resume)
            if latest is None:
                self._set_aside()
        except CheckpointError:
            raise
        except OSError as error:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: {error.filename or 'it'} cannot be written "
                f"({error.strerror}); give a directory that can"
            ) from error
        self._config_text = config_text
        if latest is None:
            self.write_config()
        else:
            self.begun = datetime.fromisoformat(latest.begun)
        return latest

    def write_config(self) -> None:
        """Write config.toml, now that the run goes on, and remove what a killed process left."""
        for partial in self.path.glob("*/.*-step_*"):
            shutil.rmtree(partial, ignore_errors=True)
        with writing("the configuration", self.path / CONFIG_FILE, SPACE):
            write_atomically(self.path / CONFIG_FILE, self._config_text)

    def load_latest(self, part: str = "") -> Checkpoint | None:
        """Return the newest checkpoint whose files in the folder `part` are as they were written.

        It is said which newer ones are damaged. Raises CheckpointError if all are.
        """
        passed: list[CheckpointError] = []
        for step, path in reversed(steps_in(self.checkpoints)):
            try:
                document = read_state(path, section="state", part=part)
            except CheckpointError as error:
                passed.append(error)
                continue
            for each in passed:
                _log.warning("%s; the checkpoint of step %d is taken", each, step)
            return Checkpoint(
                step=step,
                path=path,
                state=document["state"],
                begun=document.get("begun", ""),
                run_format=document.get("run_format"),
            )
        if passed:
            raise CheckpointError(
                f"{passed[0]}, and no other checkpoint is whole: put one back from a copy, or give "
                "another directory"
            )
        return None

    def save(
        self,
        step: int,
        save_policy: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint, then remove all but the newest `keep`.

        `save_policy` writes into the given directory. Raises CheckpointError if a write fails; the
        partial checkpoint is removed, and earlier checkpoints stay.
        """

        def write(folder: Path) -> None:
            (folder / _POLICY).mkdir()
            save_policy(folder / _POLICY)
            tensor_files.save(tensors, folder / "trainer.safetensors")
            begun = self.begun.isoformat()
            write_state(folder, {"step": step, "begun": begun, "state": dict(state)})

        remedy = f"lower run.keep_checkpoints, make run.dir writable, or {SPACE}"
        with writing(f"the checkpoint of step {step}", self.checkpoints, remedy):
            put_step(self.checkpoints, step, write, keep=self._keep)

    def close(self) -> None:
        """Unlock the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Take an advisory lock, which the system releases when the process ends."""
        assert self._lock is None, "a run directory is started once"
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # NOTE: lockf belongs to the process; flock would live on in forked graders.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: another process is running in it; wait for it, "
                "or give another directory"
            ) from None

    def _resume_point(self, config_text: str, resume: bool) -> Checkpoint | None:
        if (steps_in(self.checkpoints) or self._holds_steps()) and not resume:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: it holds an earlier run; give another directory, "
                "or run.resume = true to go on with it"
            )
        latest = self.load_latest()
        if latest and latest.run_format != RUN_FORMAT:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: another version of longtail wrote this run, and it "
                "cannot be resumed; give another run.dir, with model.path = "
                f"{str(latest.policy)!r} to continue from its policy"
            )
        if latest:
            self._refuse_changes(config_text)
        return latest

    def _refuse_changes(self, config_text: str) -> None:
        """Raise ConfigError if a configuration changes the run that the written one began."""
        path = self.path / CONFIG_FILE
        try:
            changed = configfile.differences(read_file(path).decode(), config_text)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path}: it says how the run was begun, and cannot be read ({error}); put it back "
                "from a copy, or give another run.dir"
            ) from error
        steps = {"run.steps": "learner.schedule", "train.steps": "train.schedule"}
        fixed = [
            f"{name}: {before!r} -> {after!r}"
            for name, (before, after) in changed.items()
            if name not in _MAY_DIFFER
            or configfile.lookup(config_text, steps.get(name, "")) not in (None, "constant")
        ]
        if fixed:
            changes = "\n  ".join(["", *fixed])
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: it holds a run that was begun with{changes}\n"
                "resume with its own values, or give another run.dir"
            )

    def _holds_steps(self) -> bool:
        """Return whether an earlier start completed a step, so that its logs are not empty."""
        log = self.path / "metrics.jsonl"
        return log.exists() and log.stat().st_size > 0

    def _set_aside(self) -> None:
        """Move the logs of an earlier start without a checkpoint to `earlier-N`."""
        if not self._holds_steps():
            return
        places = (self.path / f"earlier-{number}" for number in itertools.count(1))
        aside = next(place for place in places if not place.exists())
        aside.mkdir()
        for name in _LOGS:
            if (self.path / name).exists():
                (self.path / name).rename(aside / name)
        _log.warning(
            "%s: it has no checkpoint, so the run begins at step 0; its earlier logs are in %s",
            self.path,
            aside,
        )


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Return step and path of the entries of a folder that are named like step_000010, by step.

    Raises ConfigError if the folder cannot be listed.
    """
    if not folder.is_dir():
        return []
    try:
        named = [(step_of(path), path) for path in folder.iterdir()]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted((step, path) for step, path in named if step is not None)


def step_of(path: Path) -> int | None:
    """Return 10 for a path whose name is step_000010; None for other names."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def policy_with(file: str, path: Path) -> Path | None:
    """Return the directory with a file at a path, in a checkpoint, or in a run's newest whole one.

    Raises CheckpointError if it is a checkpoint's, and something in it is not as it was written.
    """
    for found in (path, path / _POLICY):
        if (found / file).is_file():
            checkpoint = found.absolute().parent
            if found.name == _POLICY and step_of(checkpoint) is not None:
                read_state(checkpoint, section="state", part=_POLICY)
            return found
    latest = RunDirectory(path).load_latest(_POLICY)
    return latest.policy if latest is not None and (latest.policy / file).is_file() else None


def policy_directory(path: Path) -> Path:
    """Return the Hugging Face directory at a path, in a checkpoint, or in a run's newest one."""
    if (found := policy_with("config.json", path)) is not None:
        return found
    if policy_with("adapter_config.json", path) is not None:
        raise ConfigError(
            f"{path}: it holds adapters alone (learner.lora); give the directory of the whole "
            "model, which `longtail merge RUN --out DIR` writes"
        )
    reason = "no such directory" if not path.exists() else "neither a model nor a run with one"
    raise ConfigError(
        f"{path}: {reason}; give a Hugging Face directory (with config.json), a checkpoint, or "
        "a run directory with at least one complete checkpoint"
    )
