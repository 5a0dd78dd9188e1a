"""Workers as the coordinator sees them: a seam, and the pool of one that needs no other process.

    start(worker, Worker.generate, requests)     a task; one at a time for each worker
    wait(seconds) -> [TaskResult(worker, result)]     what has come to its end since
    ask(worker, Worker.written, step)            a message, answered beside the task
    progress(workers)                            how far they are, of those who say so at once

Every wait has a deadline. A lost worker is reported as a failed task, and as LostWorkerError in
place of an answer, busy or idle; an exception in a task is returned in its result.
"""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, final

from longtail.cluster.records import Progress
from longtail.cluster.worker import Stopped, Worker
from longtail.errors import ClusterError, LongtailError
from longtail.system.interrupt import Interrupted

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A task came to its end: with a result, an error, or with its worker.

    Example: TaskResult(worker=1, result=served)
    """

    worker: int
    result: Any = None
    error: Exception | None = None
    is_lost: bool = False
    """The worker's process is gone; `error` says how."""

    def value(self) -> Any:
        """Return the result; raise what the task raised."""
        if self.error is not None:
            raise self.error
        return self.result


class WorkerPool(abc.ABC):
    """So many workers, by number."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of workers."""

    @abc.abstractmethod
    def start(
        self,
        worker: int,
        task: Callable[Concatenate[Worker, P], object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Begin a task; the worker has none. Raises ClusterError if it cannot be sent."""

    @abc.abstractmethod
    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Return the tasks that have ended, after so many seconds at most."""

    @abc.abstractmethod
    def ask(
        self,
        worker: int,
        message: Callable[Concatenate[Worker, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Deliver a message and return the answer.

        Raises LostWorkerError if the worker is gone, ClusterError if no answer comes in time.
        """

    @abc.abstractmethod
    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Return how far they are; who does not say so at once is left out."""

    @abc.abstractmethod
    def replace(self, worker: int) -> None:
        """End what is left of a worker, and begin another: ready once its first task ends."""

    @abc.abstractmethod
    def close(self) -> None:
        """End all workers."""


@final
class LocalWorkerPool(WorkerPool):
    """One worker in this process; its tasks are done when they are waited for."""

    def __init__(self, worker: Worker, on_step: Callable[[Progress], None]) -> None:
        self._worker = worker
        worker.on_step = on_step
        self._task: Callable[[], Any] | None = worker.ready

    @property
    def size(self) -> int:
        """One."""
        return 1

    @property
    def worker(self) -> Worker:
        """The worker."""
        return self._worker

    def start(
        self,
        worker: int,
        task: Callable[Concatenate[Worker, P], object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Put the task down."""
        assert self._task is None, "one task at a time"
        self._task = lambda: task(self._worker, *args, **kwargs)

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Do the task."""
        if self._task is None:
            return []
        task, self._task = self._task, None
        try:
            return [TaskResult(worker=0, result=task())]
        except (LongtailError, Interrupted, Stopped) as error:
            return [TaskResult(worker=0, error=error)]

    def ask(
        self,
        worker: int,
        message: Callable[Concatenate[Worker, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Ask it."""
        return message(self._worker, *args, **kwargs)

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Ask it."""
        return {worker: self._worker.progress() for worker in workers}

    def replace(self, worker: int) -> None:
        """Raise ClusterError: who shares this process goes with it."""
        raise ClusterError("a worker of this process cannot be replaced")

    def close(self) -> None:
        """Nothing to end."""
