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
          state.json                  counters and cursors; sizes and digests of all files above
        .new-step_000020/             being written; swept away at the next start

A checkpoint is written beside its place, every file and directory is synced, and one rename makes
it exist. It counts as complete when every file has the size and the SHA-256 that `state.json`
names. What goes into `tensors` and `state` is the business of the loop. Nothing is ever unpickled.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail import configfile
from longtail.errors import CheckpointError, ConfigError

_log = logging.getLogger("longtail")
_FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAY_DIFFER = frozenset(
    {
        "run.dir", "run.steps", "run.threads", "run.checkpoint_every", "run.keep_checkpoints",
        "run.resume", "run.save_rollouts", "run.writers", "run.log_every", "train.steps",
        "eval.samples", "eval.every", "reward.workers", "reward.timeout_s",
        "speculation.drafter", "speculation.tuner", "speculation.depth", "speculation.width",
        "speculation.size", "speculation.max_running", "speculation.coupled", "spot.train",
        "spot.learning_rate", "spot.matrix_rate", "spot.batch_tokens", "spot.buffer_mb",
        "spot.features_mb", "cluster.workers", "cluster.address", "cluster.hang_s",
        "learner.sharding",
    }
)  # fmt: skip
"""What a resumed run may change: nothing here reaches a weight, unless a schedule reads it."""


CONFIG_FILE = "config.toml"
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
    """Read one safetensors file into CPU memory."""
    return load_file(path)


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

        Raises ConfigError when the directory was used and `resume` is off, when it is in use, or
        when the configuration differs from the checkpoint's in what would change the run.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._claim()
            latest = self._resume_point(config_text, resume)
            self._sweep()
            _write_atomically(self.path / CONFIG_FILE, config_text)
        except OSError as error:
            self.close()
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: cannot be written ({error.strerror}); give a "
                "directory that can"
            ) from error
        except BaseException:
            self.close()
            raise
        return latest

    def load_latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint; a damaged one is passed over with a warning."""
        for step, path in reversed(self._found()):
            try:
                return Checkpoint(step=step, path=path, state=_verified_state(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
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
            _seal(temporary, step, state)
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

    def _resume_point(self, config_text: str, resume: bool) -> Checkpoint | None:
        written, metrics = self.path / CONFIG_FILE, self.path / "metrics.jsonl"
        used = self._found() or (metrics.exists() and metrics.stat().st_size > 0)
        if used and not resume:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: it holds an earlier run; give another directory, "
                "or run.resume = true to go on with it"
            )
        latest = self.load_latest()
        if latest and written.exists():
            _refuse_changes(self.path, written.read_text(encoding="utf-8"), config_text)
        return latest

    def _found(self) -> list[tuple[int, Path]]:
        """List what is named like a checkpoint, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        named = ((_NAME.fullmatch(p.name), p) for p in self.checkpoints.iterdir())
        return sorted((int(match[1]), path) for match, path in named if match)

    def _put(self, temporary: Path, final_path: Path) -> None:
        """Rename into place; a damaged namesake steps aside first."""
        aside = self.checkpoints / f".old-{final_path.name}"
        if final_path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final_path.rename(aside)
        temporary.rename(final_path)
        _sync(self.checkpoints)
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


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def _seal(root: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write state.json over everything under `root`, then sync files and directories."""
    files = {str(path.relative_to(root)): print_of(path) for path in _files(root)}
    document = {"format": _FORMAT, "step": step, "state": dict(state), "files": files}
    text = json.dumps(document, indent=1, allow_nan=False)
    (root / "state.json").write_text(text, encoding="utf-8")
    for path in _files(root):
        _sync(path)
    for directory in (*(path for path in root.rglob("*") if path.is_dir()), root):
        _sync(directory)


def print_of(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, as JSON holds them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _verified_state(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint all of whose files are as they were written."""
    document = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if document["format"] != _FORMAT:
        raise ValueError(f"state.json has format {document['format']}, known is {_FORMAT}")
    for name, expected in document["files"].items():
        if (path / name).stat().st_size != expected["bytes"]:
            raise ValueError(f"{name} should have {expected['bytes']} bytes")
        if print_of(path / name) != expected:
            raise ValueError(f"{name} does not have the SHA-256 it was written with")
    state: dict[str, Any] = document["state"]
    return state


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


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f".new-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    """Make a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
