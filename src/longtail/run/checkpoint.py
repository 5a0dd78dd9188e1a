"""The run directory and its checkpoints: either all of one is on disk, or none of it.

    runs/example/
      config.toml                     resolved configuration, of the newest start
      metrics.jsonl  rollouts.jsonl  speculation.jsonl
                                      appended by others; cut back to the checkpoint on resume
      cost.json  report.html          written anew by others
      checkpoints/
        step_000010/
          policy/                     a Hugging Face directory, written by `save_policy`
          trainer.safetensors         optimizer moments, master weights, generator states
          state.json                  counters and cursors; the seal of all files above (`files`)
        .new-step_000020/             being written; swept away at the next start
      earlier-1/                      what a run left that began anew for want of a checkpoint

A checkpoint is written beside its place, every file and directory is synced, and one rename makes
it exist. It counts as complete when every file, `state.json` among them, is as it was written. What
goes into `tensors` and `state` is the business of the loop. Nothing is ever unpickled.
"""

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail.config import files as configfile
from longtail.errors import CheckpointError, ConfigError
from longtail.system.files import open_sealed, seal_folder, sync, write_atomically

_log = logging.getLogger("longtail")
_SEAL = "state.json"
_NAME = re.compile(r"step_(\d{6,18})")
_EARLIER = re.compile(r"earlier-(\d{1,9})")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAY_DIFFER = frozenset(
    {
        "run.dir", "run.steps", "run.threads", "run.checkpoint_every", "run.keep_checkpoints",
        "run.resume", "run.save_rollouts", "run.speculation_mb", "run.writers", "run.log_every",
        "train.steps", "eval.samples", "eval.every", "reward.workers", "reward.timeout_s",
        "speculation.drafter", "speculation.tuner", "speculation.depth", "speculation.width",
        "speculation.size", "speculation.max_running", "speculation.coupled", "spot.train",
        "spot.learning_rate", "spot.matrix_rate", "spot.batch_tokens", "spot.buffer_mb",
        "spot.features_mb", "cluster.workers", "cluster.address", "cluster.hang_s",
        "learner.sharding",
    }
)  # fmt: skip
"""What a resumed run may change: nothing here reaches a weight, unless a schedule reads it."""


CONFIG_FILE = "config.toml"
_LOGS = (
    "metrics.jsonl", "rollouts.jsonl", "speculation.jsonl", "drafter.jsonl", "trace.json",
    "summary.json", "cost.json", "rollout.png", "report.html",
)  # fmt: skip
_FOLDERS = ("checkpoints", "drafter", "tensorboard")
"""What a run writes beside its configuration: files, and folders."""
UNWRITABLE = (OSError, SafetensorError)
"""What writing tensors raises when the disk refuses."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to one safetensors file; those that share storage are written out each."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        own = tensor.detach().contiguous()
        storage = own.untyped_storage()
        alone = storage.nbytes() == own.nbytes and storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        separate[name] = own if alone else own.clone()
    save_file(separate, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read one safetensors file into CPU memory; ValueError where it is none."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged ({error})") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Example: Checkpoint(step=10, path=Path("runs/x/checkpoints/step_000010"), state={"cursor": 160})
    """

    step: int
    path: Path
    state: Mapping[str, Any]
    """JSON values, floats to the last bit."""

    @property
    def policy(self) -> Path:
        """The Hugging Face directory of the policy."""
        return self.path / "policy"

    def tensors(self) -> dict[str, Tensor]:
        """Read the trainer's tensors."""
        return load_tensors(self.path / "trainer.safetensors")


@final
class RunDirectory:
    """One run's files. `start` claims it for this process, `save` adds to it, `close` lets go.

    Lifecycle:  with RunDirectory(path) as run: start -> save, save, ...
    `load_latest` and reading need no start.
    """

    def __init__(self, path: Path, *, keep: int = 2) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._keep = keep
        self._lock: int | None = None

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, config_text: str, *, resume: bool) -> Checkpoint | None:
        """Claim the directory, write config.toml, return the checkpoint to go on from, if any.

        Without one, what an earlier start left is moved to `earlier-N`, and said. Raises
        ConfigError when the directory was used and `resume` is off, when it is in use, when all its
        checkpoints are damaged, when the configuration differs from the checkpoint's in what would
        change the run, or when a file of it is no file.
        """
        try:
            self._refuse_misplaced()
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._claim()
            latest = self._resume_point(config_text, resume)
            self._sweep()
            if latest is None:
                self._set_aside()
            write_atomically(self.path / CONFIG_FILE, config_text)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: {error.filename or 'it'} cannot be written "
                f"({error.strerror}); give a directory that can"
            ) from error
        except BaseException:
            self.close()
            raise
        return latest

    def load_latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; a damaged one is passed over with a warning."""
        for step, path in reversed(self._found()):
            try:
                document = open_sealed(path, _SEAL)
                if document.get("step") != step or not isinstance(document.get("state"), dict):
                    raise ValueError(f"{_SEAL} is of another step")
                return Checkpoint(step=step, path=path, state=document["state"])
            except (OSError, ValueError) as error:
                _log.warning("%s is damaged and passed over: %s", path, error)
        return None

    def save(
        self,
        step: int,
        save_policy: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Checkpoint:
        """Write a checkpoint, then remove all but the newest `keep`.

        `save_policy` fills the directory it is given. Raises CheckpointError when the disk refuses;
        what was written goes away again, and earlier checkpoints are untouched.
        """
        final_path = self.checkpoints / f"step_{step:06d}"
        temporary = self.checkpoints / f".new-{final_path.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "policy").mkdir(parents=True)
            save_policy(temporary / "policy")
            save_tensors(tensors, temporary / "trainer.safetensors")
            seal_folder(temporary, _SEAL, {"step": step, "state": dict(state)})
            self._put(temporary, final_path)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError(_refusal(step, self.checkpoints, error)) from error
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self._prune(step)
        return Checkpoint(step=step, path=final_path, state=dict(state))

    def close(self) -> None:
        """Let go of the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _claim(self) -> None:
        """Hold an advisory lock; the system drops it when the process ends, however it ends."""
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

    def _refuse_misplaced(self) -> None:
        """Raise ConfigError for a folder in a file's place, and the other way round."""
        places = [(name, Path.is_file, "a file") for name in (CONFIG_FILE, ".lock", *_LOGS)]
        places += [(name, Path.is_dir, "a folder") for name in _FOLDERS]
        for name, fits, kind in places:
            path = self.path / name
            if os.path.lexists(path) and not fits(path):
                raise ConfigError(
                    f"run.dir = {str(self.path)!r}: {name} in it is not {kind}; move it away, or "
                    "give another directory"
                )

    def _resume_point(self, config_text: str, resume: bool) -> Checkpoint | None:
        found = self._found()
        if (found or self._holds_steps()) and not resume:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: it holds an earlier run; give another directory, "
                "or run.resume = true to go on with it"
            )
        latest = self.load_latest()
        if found and not latest:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: none of its {len(found)} checkpoints can be used "
                "(see above); put back what is missing from a copy, or move its checkpoints folder "
                "away to begin at step 0"
            )
        if latest:
            _refuse_changes(self.path, self._written_config(), config_text)
        return latest

    def _holds_steps(self) -> bool:
        """Tell whether an earlier start completed anything; an empty log is of one that did not."""
        logs = (self.path / name for name in ("metrics.jsonl", "rollouts.jsonl"))
        return any(log.exists() and log.stat().st_size > 0 for log in logs)

    def _written_config(self) -> str:
        """Return the configuration that the run was begun with."""
        path = self.path / CONFIG_FILE
        try:
            text = path.read_text(encoding="utf-8")
            configfile.differences(text, text)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}: it says how the run was begun, and cannot be read ({error}); put it back "
                "from a copy, or give another run.dir"
            ) from error
        return text

    def _set_aside(self) -> None:
        """Move what an earlier start logged out of the way of one that begins at step 0."""
        if not self._holds_steps():
            return
        numbers = (
            int(match[1])
            for path in self.path.iterdir()
            if (match := _EARLIER.fullmatch(path.name))
        )
        aside = self.path / f"earlier-{max(numbers, default=0) + 1}"
        aside.mkdir()
        for name in (*_LOGS, *_FOLDERS):
            if (self.path / name).exists() and name != self.checkpoints.name:
                (self.path / name).rename(aside / name)
        _log.warning(
            "%s: no checkpoint is left, so the run begins at step 0; its earlier logs are in %s",
            self.path,
            aside,
        )

    def _found(self) -> list[tuple[int, Path]]:
        """List what is named like a checkpoint, oldest first."""
        return steps_in(self.checkpoints)

    def _put(self, temporary: Path, final_path: Path) -> None:
        """Rename into place; a damaged namesake steps aside first."""
        aside = self.checkpoints / f".old-{final_path.name}"
        if final_path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final_path.rename(aside)
        temporary.rename(final_path)
        sync(self.checkpoints)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Remove the oldest, and what is newer than the newest: a resume passed it over."""
        valid = [path for step, path in self._found() if step <= newest][-self._keep :]
        for _, path in self._found():
            if path not in valid:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what a killed process left half written."""
        for path in self.checkpoints.glob(".*-step_*"):
            shutil.rmtree(path, ignore_errors=True)


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """List what is named step_000010 in a folder, by step; ConfigError if it cannot be listed."""
    if not folder.is_dir():
        return []
    try:
        named = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from error
    return sorted((int(match[1]), path) for match, path in named if match)


def policy_directory(path: Path) -> Path:
    """Return the Hugging Face directory that a path means: itself, a checkpoint's, or a run's."""
    if (path / "config.json").is_file():
        return path
    if (path / "policy" / "config.json").is_file():
        return path / "policy"
    latest = RunDirectory(path).load_latest()
    if latest:
        return latest.policy
    reason = "no such directory" if not path.exists() else "neither a model nor a run with one"
    raise ConfigError(
        f"{path}: {reason}; give a Hugging Face directory (with config.json), a checkpoint, or "
        "a run directory with at least one complete checkpoint"
    )


def _refuse_changes(path: Path, old: str, new: str) -> None:
    """Raise ConfigError if going on under `new` would not be the run that `old` began."""
    changed = configfile.differences(old, new)
    steps = {"run.steps": "learner.schedule", "train.steps": "train.schedule"}
    fixed = [
        f"{name}: {before!r} -> {after!r}"
        for name, (before, after) in changed.items()
        if name not in _MAY_DIFFER or (name in steps and _scheduled(new, steps[name]))
    ]
    if fixed:
        raise ConfigError(
            "\n  ".join([f"run.dir = {str(path)!r}: it holds a run that was begun with", *fixed])
            + "\ngo on with its own values, or give another run.dir"
        )


def _scheduled(config_text: str, name: str) -> bool:
    """Tell whether the learning rate depends on the number of steps."""
    return configfile.lookup(config_text, name) not in (None, "constant")


def _refusal(step: int, place: Path, error: Exception) -> str:
    """Say why a checkpoint could not be written, and what helps."""
    cause = error.__cause__ or error
    full = isinstance(cause, OSError) and cause.errno in _FULL_DISK
    full = full or any(f"os error {number}" in str(cause) for number in _FULL_DISK)
    remedy = (
        f"free some space ({shutil.disk_usage(place).free / 1e9:.2f} GB left), or lower "
        "run.keep_checkpoints"
        if full
        else "see that run.dir can be written"
    )
    return (
        f"checkpoint of step {step} in {place}: {error}; {remedy}, then start again: the run "
        "resumes from the checkpoint before"
    )
