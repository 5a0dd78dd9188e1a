"""The run directory and its checkpoints; a checkpoint is on disk completely or not at all.

    runs/example/
      config.toml                     resolved configuration, of the newest start
      metrics.jsonl, rollouts.jsonl   logs, as speculation.jsonl; cut back on resume
      cost.json  report.html          replaced as a whole
      checkpoints/
        step_000010/
          policy/                     a Hugging Face directory, written by `save_policy`
          trainer.safetensors         optimizer moments, master weights, generator states
          state.json                  counters and cursors; the seal of all files above (`files`)
        .new-step_000020/             being written; removed at the next start
      earlier-1/                      logs of an earlier run without a checkpoint

A checkpoint is written under a temporary name, synced, and renamed. It is complete if its files
have the digests in `state.json`. Nothing is unpickled.
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
RUN_FORMAT = 3
"""Version of state, metric names and configuration fields; runs of other versions do not resume."""
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
        "spot.features_mb", "cluster.workers", "cluster.address", "cluster.worker_timeout_s",
        "learner.sharding",
    }
)  # fmt: skip
"""Fields that a resumed run may change; none affects a weight, unless a schedule uses it."""


CONFIG_FILE = "config.toml"
_LOGS = (
    "metrics.jsonl", "rollouts.jsonl", "speculation.jsonl", "drafts.jsonl", "drafter.jsonl",
    "trace.json", "summary.json", "cost.json", "rollout.png", "report.html",
)  # fmt: skip
_FOLDERS = ("checkpoints", "drafter", "tensorboard")
UNWRITABLE = (OSError, SafetensorError)  # a failed write of tensors


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to one safetensors file; tensors that share storage are copied."""
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
    """Read a safetensors file into CPU memory. Raises ValueError if it is damaged."""
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
    """JSON values; floats are exact."""
    run_format: int | None = RUN_FORMAT
    """`RUN_FORMAT` of the writer; None if it recorded none."""

    @property
    def policy(self) -> Path:
        """The Hugging Face directory of the policy."""
        return self.path / "policy"

    def tensors(self) -> dict[str, Tensor]:
        """Read the trainer's tensors."""
        return load_tensors(self.path / "trainer.safetensors")


@final
class RunDirectory:
    """Directory of a run: `start` locks it for this process, `save` adds checkpoints.

    Lifecycle:  with RunDirectory(path) as run: start -> save, save, ...
    `load_latest` needs no start.
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
        """Lock the directory, write config.toml, and return the checkpoint to resume, if any.

        Without a checkpoint, earlier logs are moved to `earlier-N` with a warning. Raises
        ConfigError if the directory is used and `resume` is off, if it is locked, if its run is of
        another version of longtail or all checkpoints are damaged, if the configuration changes the
        run, or if a file has the place of a folder.
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
        """Return the newest complete checkpoint; damaged ones are skipped with a warning."""
        for step, path in reversed(self._found()):
            try:
                document = open_sealed(path, _SEAL)
                if document.get("step") != step or not isinstance(document.get("state"), dict):
                    raise ValueError(f"{_SEAL} is of another step")
                written_by = document.get("run_format")
                return Checkpoint(
                    step=step, path=path, state=document["state"], run_format=written_by
                )
            except (OSError, ValueError) as error:
                _log.warning("%s is damaged and skipped: %s", path, error)
        return None

    def save(
        self,
        step: int,
        save_policy: Callable[[Path], None],
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
    ) -> Checkpoint:
        """Write a checkpoint, then remove all but the newest `keep`.

        `save_policy` writes into the given directory. Raises CheckpointError if a write fails; the
        partial checkpoint is removed, and earlier checkpoints stay.
        """
        final_path = self.checkpoints / f"step_{step:06d}"
        temporary = self.checkpoints / f".new-{final_path.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / "policy").mkdir(parents=True)
            save_policy(temporary / "policy")
            save_tensors(tensors, temporary / "trainer.safetensors")
            seal_folder(
                temporary, _SEAL, {"run_format": RUN_FORMAT, "step": step, "state": dict(state)}
            )
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

    def _refuse_misplaced(self) -> None:
        """Raise ConfigError for a folder in the place of a file, or a file in that of a folder."""
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
        if latest and latest.run_format != RUN_FORMAT:
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: another version of longtail wrote this run, and it "
                "cannot be resumed; give another run.dir, with model.path = "
                f"{str(latest.policy)!r} to continue from its policy"
            )
        if latest:
            _refuse_changes(self.path, self._written_config(), config_text)
        return latest

    def _holds_steps(self) -> bool:
        """Return whether an earlier start completed a step, so that its logs are not empty."""
        logs = (self.path / name for name in ("metrics.jsonl", "rollouts.jsonl"))
        return any(log.exists() and log.stat().st_size > 0 for log in logs)

    def _written_config(self) -> str:
        """Return the configuration of the run's last start."""
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
        """Move the logs of an earlier start without a checkpoint to `earlier-N`."""
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
        """Return step and path of all checkpoints, damaged ones included, oldest first."""
        return steps_in(self.checkpoints)

    def _put(self, temporary: Path, final_path: Path) -> None:
        """Rename into place, after moving a damaged checkpoint of the same name away."""
        aside = self.checkpoints / f".old-{final_path.name}"
        if final_path.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final_path.rename(aside)
        temporary.rename(final_path)
        sync(self.checkpoints)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Remove the oldest checkpoints, and damaged ones of later steps."""
        valid = [path for step, path in self._found() if step <= newest][-self._keep :]
        for _, path in self._found():
            if path not in valid:
                shutil.rmtree(path, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove the partial checkpoints of a killed process."""
        for path in self.checkpoints.glob(".*-step_*"):
            shutil.rmtree(path, ignore_errors=True)


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


def policy_directory(path: Path) -> Path:
    """Return the Hugging Face directory at a path, in a checkpoint, or in a run's newest one."""
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
    """Raise ConfigError if configuration `new` changes the run that `old` started."""
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
            + "\nresume with its own values, or give another run.dir"
        )


def _scheduled(config_text: str, name: str) -> bool:
    """Return whether the learning rate depends on the number of steps."""
    return configfile.lookup(config_text, name) not in (None, "constant")


def _refusal(step: int, place: Path, error: Exception) -> str:
    """Return the message for a failed checkpoint: its cause and the remedy."""
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
