"""Metrics: summary statistics, stopwatch, and writers.

Names are verl's: `reward/mean`, `response_length/p99`, `timing_s/rollout`.

    {"step": 3, "reward/mean": 0.41, "timing_s/rollout": 6.2}      one line of metrics.jsonl
"""

import abc
import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from longtail.errors import CheckpointError, ConfigError
from longtail.system import machine

_log = logging.getLogger("longtail")
Number = int | float


def summarize(name: str, values: Sequence[Number]) -> dict[str, float]:
    """Return mean, population standard deviation, minimum and maximum; {} without values.

    Example: summarize("reward", [0, 1]) == {"reward/mean": 0.5, "reward/std": 0.5,
                                             "reward/min": 0.0, "reward/max": 1.0}
    """
    if not values:
        return {}
    array = np.asarray(values, dtype=np.float64)
    numbers = {"mean": array.mean(), "std": array.std(), "min": array.min(), "max": array.max()}
    return {f"{name}/{key}": float(number) for key, number in numbers.items()}


def summarize_lengths(lengths: Sequence[int], name: str = "response_length") -> dict[str, float]:
    """Return mean, p50, p90, p99 and max of lengths in tokens; {} without lengths.

    A percentile is a length that occurs (numpy's inverted_cdf).
    """
    if not lengths:
        return {}
    array = np.asarray(lengths, dtype=np.float64)
    numbers = {"mean": array.mean(), "max": array.max()}
    for percent in (50, 90, 99):
        numbers[f"p{percent}"] = np.percentile(array, percent, method="inverted_cdf")
    order = ("mean", "p50", "p90", "p99", "max")
    return {f"{name}/{key}": float(numbers[key]) for key in order}


def timing(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds under metric names: {"rollout": 6.2} -> {"timing_s/rollout": 6.2}."""
    return {f"timing_s/{section}": value for section, value in seconds.items()}


@final
class Stopwatch:
    """Seconds of each section since the last `lap`; repeated sections are summed.

    Example: with watch.section("rollout"): ...
             watch.lap() == {"rollout": 6.2, "step": 8.0}     step is all time since the last lap
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._start = clock()

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a section, also after an exception."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - begin

    def lap(self) -> dict[str, float]:
        """Return the seconds of each section and of the whole step, and restart."""
        now = self._clock()
        seconds = {**self._seconds, "step": now - self._start}
        self._seconds.clear()
        self._start = now
        return seconds


class MetricWriter(abc.ABC):
    """Destination of metrics."""

    @abc.abstractmethod
    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Write the metrics of one step; steps come in ascending order."""

    @abc.abstractmethod
    def close(self) -> None:
        """Write pending data and close."""


@final
class JsonLines(MetricWriter):
    """A file with one JSON object per line, each with a `step`; lines are not buffered.

    A killed process leaves at most one torn line, and lines of steps after the last checkpoint.
    Opening the file for a resumed run removes both.
    """

    def __init__(
        self, path: Path, *, last_step: int | None = None, most_bytes: int | None = None
    ) -> None:
        """Open for lines after `last_step`, the checkpoint's; None starts a new file.

        A file that exceeds `most_bytes` loses its oldest lines, down to half of that size.
        """
        self._path, self._most_bytes = path, most_bytes
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is None:
                path.unlink(missing_ok=True)
            elif path.exists():
                _cut_back(path, last_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritten(path, error.strerror) from error

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write one line; numbers that are not finite become null.

        Raises CheckpointError if the write fails.
        """
        plain = {"step": step, **_finite(metrics)}
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False)
        line = text.encode(errors="backslashreplace") + b"\n"  # a lone surrogate is escaped
        try:
            written = self._file.write(line)
            if written == len(line) and self._most_bytes is not None:
                self._drop_oldest(self._most_bytes, len(line))
        except OSError as error:
            raise _unwritten(self._path, error.strerror) from error
        if written != len(line):
            raise _unwritten(self._path, "the disk is full")

    def _drop_oldest(self, most_bytes: int, newest: int) -> None:
        """Keep the newest lines that fit into half of `most_bytes`, at least the last one."""
        size = self._file.tell()
        if size <= max(most_bytes, newest):
            return
        temporary = self._path.with_name(f".new-{self._path.name}")
        with self._path.open("rb") as old, temporary.open("wb") as new:
            old.seek(size - max(most_bytes // 2, newest) - 1)
            old.readline()  # the rest of a line that is dropped
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())
        self._file.close()
        temporary.replace(self._path)
        self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class TensorBoardWriter(MetricWriter):
    """TensorBoard event files in `directory`; needs the extra `tensorboard`."""

    def __init__(self, directory: Path, *, last_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("tensorboard") from error
        purge = None if last_step is None else last_step + 1
        self._writer = SummaryWriter(str(directory), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


@final
class WandbWriter(MetricWriter):
    """Weights & Biases; needs the extra `wandb`. Without an API key it records offline.

    The run's id is a digest of its directory, so a resumed run continues the same record.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb") from error
        reachable = "WANDB_API_KEY" in os.environ or (Path.home() / ".netrc").exists()
        mode = os.environ.get("WANDB_MODE", "online" if reachable else "offline")
        run_id = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(
            project="longtail", name=directory.name, id=run_id, resume="allow",
            dir=str(directory), mode=mode, config=dict(config),
        )  # fmt: skip

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the record; offline records stay in the run's directory."""
        self._run.finish()


@final
class ManyWriters(MetricWriter):
    """Several writers as one."""

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """Write the metrics to each writer."""
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        """Close each writer."""
        for writer in self._writers:
            writer.close()


def open_writers(
    names: Sequence[str], directory: Path, *, last_step: int | None, config: Mapping[str, Any]
) -> MetricWriter:
    """Open metrics.jsonl in a run directory, and the writers in `run.writers`.

    `last_step` is the step of the checkpoint that the run resumes, None for a new run.
    """
    makers: dict[str, Callable[[], MetricWriter]] = {
        "tensorboard": lambda: TensorBoardWriter(directory / "tensorboard", last_step=last_step),
        "wandb": lambda: WandbWriter(directory, config),
    }
    extra = [makers[name]() for name in names]
    return ManyWriters([JsonLines(directory / "metrics.jsonl", last_step=last_step), *extra])


def _cut_back(path: Path, last_step: int) -> None:
    """Keep the whole lines of steps up to `last_step`; one rename replaces the file."""
    temporary = path.with_name(f".new-{path.name}")
    damaged = 0
    with path.open("rb") as old, temporary.open("wb") as new:
        for line in old:
            step = _step_of(line)
            if step <= last_step:
                new.write(line)
            damaged += math.isinf(step) and line.endswith(b"\n")
        new.flush()
        os.fsync(new.fileno())
    temporary.replace(path)
    if damaged:
        _log.warning("%s: %d damaged lines are left out", path, damaged)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for a torn or damaged line."""
    if not line.endswith(b"\n"):
        return math.inf
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, at any depth."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _unwritten(path: Path, reason: str | None) -> CheckpointError:
    return CheckpointError(
        f"{path}: {reason}; free some space, then start again: the run resumes from its newest "
        "checkpoint"
    )


def _missing(extra: str) -> ConfigError:
    return ConfigError(
        f"run.writers names {extra!r}, which is not installed; {machine.pip_install(extra)}"
    )
