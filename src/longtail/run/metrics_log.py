"""The log of each step's metrics: metrics.jsonl and experiment trackers.

Names are verl's: `reward/mean`, `response_length/p99`, `timing_s/rollout`.

    {"step": 3, "reward/mean": 0.41, "timing_s/rollout": 6.2}      one line of metrics.jsonl
"""

import errno
import hashlib
import itertools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from longtail.errors import SPACE
from longtail.system.files import json_line, writing
from longtail.system.machine import import_extra

Number = int | float
_BEGINS = re.compile(rb'\{"step": (\d+)[,}]')
_ENDS = re.compile(rb'"step": (\d+)\}\},\n$')


@final
class JsonLines:
    """A file with one JSON object per line, each with a `step`; lines are not buffered.

    A killed process leaves at most one torn line, and lines of steps after the last checkpoint.
    Opening the file for a resumed run removes both.
    """

    def __init__(self, path: Path, *, last_step: int | None = None, head: bytes = b"") -> None:
        """Open for lines after `last_step`, the checkpoint's; None starts a new file.

        `head` is its first line.
        """
        self._path = path
        with writing("a log", path, SPACE):
            path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is None or not path.is_file():  # a pipe would be waited for
                path.unlink(missing_ok=True)
            else:
                with path.open("rb") as old:
                    kept = (line for line in old if _is_until(last_step, line))
                    _replace(path, itertools.chain([head], kept))
            self._file = path.open("ab", buffering=0)
            if not self._file.tell():
                self.append(head)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line; numbers that are not finite become null.

        Raises CheckpointError if the write fails.
        """
        plain = {"step": step, **_finite(metrics)}
        # a lone surrogate is escaped
        self.append(json_line(plain).encode(errors="backslashreplace") + b"\n")

    def append(self, lines: bytes) -> None:
        """Write lines. Raises CheckpointError if the write fails."""
        with writing("a log", self._path, SPACE):
            if self._file.write(lines) != len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class MetricLog:
    """metrics.jsonl in a run directory, and the trackers that `run.writers` names.

    `last_step` is the step of the checkpoint that the run resumes, None for a new run.
    """

    def __init__(
        self,
        writers: Sequence[str],
        directory: Path,
        *,
        last_step: int | None,
        config: Mapping[str, Any],
    ) -> None:
        self._board = _tensorboard(directory, last_step) if "tensorboard" in writers else None
        self._wandb = _wandb_run(directory, config) if "wandb" in writers else None
        self._file = JsonLines(directory / "metrics.jsonl", last_step=last_step)

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Write the metrics of one step; steps come in ascending order."""
        self._file.write(step, metrics)
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()
        if self._wandb is not None:
            self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write pending data and close; offline records of wandb stay in the run's directory."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def _tensorboard(directory: Path, last_step: int | None) -> Any:
    """Open TensorBoard's event files."""
    board = import_extra("torch.utils.tensorboard", "tensorboard", "run.writers")
    purge = None if last_step is None else last_step + 1
    return board.SummaryWriter(str(directory / "tensorboard"), purge_step=purge)


def _wandb_run(directory: Path, config: Mapping[str, Any]) -> Any:
    """Open a run of Weights & Biases, which is offline without an API key.

    Its id is a digest of the directory, so a resumed run continues the same record.
    """
    wandb = import_extra("wandb", "wandb", "run.writers")
    reachable = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
    mode = os.environ.get("WANDB_MODE", "online" if reachable else "offline")
    run_id = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    return wandb.init(
        project="longtail", name=directory.name, id=run_id, resume="allow", dir=str(directory),
        mode=mode, config=dict(config),
    )  # fmt: skip


def _replace(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a file by its lines that stay, in one rename."""
    temporary = path.with_name(f".new-{path.name}")
    with temporary.open("wb") as new:
        new.writelines(lines)
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)


def _is_until(last_step: int, line: bytes) -> bool:
    """Return whether a line is of a step up to `last_step`, and whole."""
    step = step_of_line(line)
    return step is not None and step <= last_step and line.endswith(b"\n")


def step_of_line(line: bytes) -> int | None:
    """Return the step of a row, which begins with it, or of a trace event, which ends with it."""
    found = _BEGINS.match(line) or _ENDS.search(line, max(len(line) - 40, 0))
    return None if found is None else int(found[1])


def read_line(line: bytes, is_kind: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any] | None:
    """Return the object of a log's line; None for a line of another kind, as one that was edited.

    Half a surrogate pair is kept: texts may hold one.
    """
    try:
        found = json.loads(line.rstrip(b",\n"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and is_kind(found) else None


def is_row(row: Mapping[str, Any]) -> bool:
    """Return whether an object has a step and numbers, as each line of metrics.jsonl."""
    known = (value for value in row.values() if value is not None)
    return isinstance(row.get("step"), int) and all(map(is_number, known))


def is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
