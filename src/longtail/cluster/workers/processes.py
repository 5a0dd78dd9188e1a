"""The processes of the workers, and the calls of their tasks and messages.

A worker runs one task at a time, and answers messages meanwhile. Every wait has a deadline. A lost
worker is reported as a failed task, and as LostWorkerError in place of an answer, busy or idle; an
exception in a task is returned in its result.
"""

import abc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, final

from longtail.cluster.records import Progress, TaskResult
from longtail.cluster.workers.worker import Stopped, Worker
from longtail.errors import ClusterError, LongtailError
from longtail.system.interrupt import Interrupted

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place of a worker: its number, and what is known of its machine."""

    worker: int = 0
    sharing: int = 1
    """Number of workers that share the machine's cores."""
    found: Mapping[Path, Path] = field(default_factory=dict)
    """Directories of the driver's host, and their places on this one."""

    def local(self, path: Path) -> Path:
        """Return where a path of the driver's host is on this one."""
        for there, here in self.found.items():
            if path.is_relative_to(there):
                return here / path.relative_to(there)
        return path


class Processes(abc.ABC):
    """The processes of a fixed number of workers, numbered from 0."""

    size: int
    """Number of workers."""

    def now(self) -> float:
        """Return the time in seconds."""
        return time.perf_counter()

    def absent(self) -> frozenset[int]:
        """Return the workers whose processes wait for room on a host."""
        return frozenset()

    @abc.abstractmethod
    def start(self, worker: int, task: Callable[..., object], *args: object) -> None:
        """Start a task on an idle worker. Raises ClusterError if it cannot be sent."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        """Return the tasks that have ended; wait for one for at most `timeout_s`."""

    @abc.abstractmethod
    def answers(
        self, message: Callable[..., R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, R | ClusterError]:
        """Deliver a message to workers, each with its own arguments, and return their answers.

        In place of one: LostWorkerError if the worker is gone, ClusterError if none comes in time.
        """

    @abc.abstractmethod
    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of the workers that answer at once."""

    def rendezvous_address(self) -> str:
        """Return a new address at which the learners form a team. Raises ClusterError."""
        raise NotImplementedError

    def replace(self, worker: int) -> None:
        """Kill a worker and start another, which is ready once its first task ends."""
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers."""


@final
class LocalProcess(Processes):
    """One worker in this process; `wait` runs its tasks. It has no team, and is not replaced."""

    size = 1

    def __init__(
        self, make: Callable[[Place], Worker], on_step: Callable[[Progress], None]
    ) -> None:
        self._worker = make(Place())
        self._worker.on_step = on_step
        self._task: Callable[[], Any] | None = self._worker.ready

    def start(self, worker: int, task: Callable[..., object], *args: object) -> None:
        """Keep the task for `wait`."""
        assert self._task is None, "one task at a time"
        self._task = lambda: task(self._worker, *args)

    def wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        """Run the task."""
        if self._task is None:
            return []
        task, self._task = self._task, None
        try:
            return [TaskResult(worker=0, result=task())]
        except (LongtailError, Interrupted, Stopped) as error:
            return [TaskResult(worker=0, error=error)]

    def answers(
        self, message: Callable[..., R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, R | ClusterError]:
        """Call the message."""
        return {worker: message(self._worker, *own) for worker, own in args.items()}

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Return the progress of the worker."""
        return {worker: self._worker.progress() for worker in workers}

    def close(self) -> None:
        """End what the worker started."""
        self._worker.close()
