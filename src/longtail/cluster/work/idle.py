"""Work for workers that have nothing to generate, and what assigns it to them.

    idle worker ---> the first kind of work that has some for it, or rest

A rollout waits for no such work. `learning` learns from finished groups, and `drafter_publisher`
trains the drafter.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, final

from longtail.cluster.records import TaskResult
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.types import Completion

POLL_S = 0.2
"""Seconds between two looks at the workers."""


class IdleWork:
    """One kind of work for idle workers in one rollout."""

    is_endless = True
    """Whether it goes on until it is ended."""

    def has_work(self, worker: int) -> bool:
        """Return whether there is something to do for an idle worker, or one that does this."""
        raise NotImplementedError

    def start(self, worker: int) -> None:
        """Start the work on an idle worker."""
        raise NotImplementedError

    def end(self, worker: int) -> None:
        """End endless work of a worker soon."""

    def add(self, completions: Sequence[Completion]) -> None:
        """Take completions as they are finished."""

    def on_ended(self, ended: TaskResult[Any]) -> None:
        """Record the end of a worker's task, or the loss of a worker that did it."""

    def on_lost(self, worker: int) -> None:
        """Forget what a lost worker had, whatever it did."""

    def poll(self, answering: Collection[int]) -> None:
        """Exchange what is new with the workers, of which only those in `answering` are asked."""


@final
class IdleCoordinator:
    """Gives idle workers work, the first kinds before the others."""

    def __init__(self, pool: WorkerPool, works: Sequence[IdleWork]) -> None:
        self._pool, self._works = pool, tuple(works)
        self._at: dict[int, IdleWork] = {}
        """Work of each worker that has one."""

    def assign(self) -> None:
        """Start work on each idle worker for which there is some."""
        for worker in self._pool.workers(State.IDLE):
            if (work := self._first(worker)) is not None:
                self._at[worker] = work
                work.start(worker)

    def _first(self, worker: int) -> IdleWork | None:
        return next((work for work in self._works if work.has_work(worker)), None)

    def add(self, completions: Sequence[Completion]) -> None:
        """Hand finished completions to all work."""
        for work in self._works:
            work.add(completions)

    def on_ended(self, ended: TaskResult[Any]) -> bool:
        """Record the end of a task; return whether it was idle work."""
        work = self._at.pop(ended.worker, None)
        if ended.is_lost:
            for each in self._works:
                each.on_lost(ended.worker)
        if work is not None:
            work.on_ended(ended)
        return work is not None

    def poll(self, answering: Iterable[int]) -> None:
        """Exchange what is new; endless work is ended for work of an earlier kind, or rest."""
        for work in self._works:
            work.poll(tuple(answering))
        for worker, work in list(self._at.items()):
            if work.is_endless and self._first(worker) is not work:
                self.end(worker)

    def end(self, worker: int) -> None:
        """End the endless work of a worker; it is idle soon."""
        self._at[worker].end(worker)

    def end_all(self) -> None:
        """End all endless work."""
        for worker in [each for each, work in self._at.items() if work.is_endless]:
            self.end(worker)
