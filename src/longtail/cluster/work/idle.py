"""Work for workers that have nothing to generate, and what assigns it to them.

    idle worker ---> the work that gains most for each second of it, or rest

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

    def rate(self, worker: int, rest_s: float) -> float:
        """Return the seconds that steps gain for each second of a worker's work from now on.

        The rollout ends in `rest_s`. 0 if there is nothing to do.
        """
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
    """Gives idle workers the work that gains most."""

    def __init__(self, pool: WorkerPool, works: Sequence[IdleWork]) -> None:
        self._pool, self._works = pool, tuple(works)
        self._at: dict[int, IdleWork] = {}
        """Work of each worker that has one."""

    def assign(self, rest_s: float) -> None:
        """Start the best work on each idle worker, if any gains."""
        for worker in self._pool.workers(State.IDLE):
            if (work := self._best(worker, rest_s)) is not None:
                self._at[worker] = work
                work.start(worker)

    def _best(self, worker: int, rest_s: float) -> IdleWork | None:
        rates = [(work.rate(worker, rest_s), work) for work in self._works]
        rate, work = max(rates, key=lambda each: each[0], default=(0.0, None))
        return work if rate > 0.0 else None

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

    def poll(self, answering: Iterable[int], rest_s: float) -> None:
        """Exchange what is new; endless work is ended for better work, or rest."""
        for work in self._works:
            work.poll(tuple(answering))
        for worker, work in list(self._at.items()):
            if work.is_endless and self._best(worker, rest_s) is not work:
                self.end(worker)

    def end(self, worker: int) -> None:
        """End the endless work of a worker; it is idle soon."""
        self._at[worker].end(worker)

    def end_all(self) -> None:
        """End all endless work."""
        for worker in [each for each, work in self._at.items() if work.is_endless]:
            self.end(worker)
