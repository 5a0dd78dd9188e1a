"""Work for workers that have no text to write, and the one who gives it to them.

    idle worker ---> the work that gains most for each second of it, or rest

A rollout waits for no such work. `learning` learns from finished groups, `spot` trains the drafter;
`sharing` moves requests, to an idle worker or away from one that then learns. Each kind predicts
its gain from the same `Forecast`, whose numbers are measured.
"""

import abc
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, final

from longtail.cluster.pool import TaskResult
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected rest of the present rollout.

    Example: Forecast(num_workers=4, rest_s=3.5, slowdown=0.05)
    """

    num_workers: int
    rest_s: float
    """Seconds until the last text is written; 0 after that."""
    slowdown: float
    """Seconds that the rollout loses for each second in which a worker does other work beside it;
    workers of one machine share its memory."""


class IdleWork(abc.ABC):
    """One kind of work for idle workers in one rollout."""

    is_endless: bool
    """Whether it goes on until it is stopped."""

    @abc.abstractmethod
    def rate(self, worker: int, forecast: Forecast) -> float:
        """Return the seconds that steps gain for each second of a worker's work from now on.

        `Forecast.slowdown` is subtracted. 0 if there is nothing to do.
        """

    @abc.abstractmethod
    def start(self, worker: int) -> None:
        """Start the work on an idle worker."""

    @abc.abstractmethod
    def on_ended(self, ended: TaskResult[Any]) -> None:
        """Record the end of a worker's task, or the loss of a worker that did it."""

    @abc.abstractmethod
    def on_lost(self, worker: int) -> None:
        """Forget what a lost worker had, whatever it did."""

    @abc.abstractmethod
    def poll(self, answering: Collection[int], forecast: Forecast) -> None:
        """Exchange what is new with the workers, of which only those in `answering` are asked."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ask workers that can be stopped to stop; called when the last text is written."""


@final
class IdleCoordinator:
    """Gives idle workers the work that gains most."""

    def __init__(self, supervisor: WorkerSupervisor, works: Sequence[IdleWork]) -> None:
        self._supervisor, self._works = supervisor, tuple(works)
        self._at: dict[int, IdleWork] = {}
        """Work of each worker that has one."""

    @property
    def busy(self) -> list[int]:
        """Workers that do idle work."""
        return sorted(self._at)

    def assign(self, forecast: Forecast) -> None:
        """Start the best work on each idle worker, if any gains."""
        for worker in self._supervisor.workers(State.IDLE):
            if (work := self._best(worker, forecast)) is not None:
                self._at[worker] = work
                work.start(worker)

    def _best(self, worker: int, forecast: Forecast) -> IdleWork | None:
        rates = [(work.rate(worker, forecast), work) for work in self._works]
        rate, work = max(rates, key=lambda each: each[0], default=(0.0, None))
        return work if rate > 0.0 else None

    def on_ended(self, ended: TaskResult[Any]) -> bool:
        """Record the end of a task; return whether it was idle work."""
        work = self._at.pop(ended.worker, None)
        if ended.is_lost:
            for each in self._works:
                each.on_lost(ended.worker)
        if work is not None:
            work.on_ended(ended)
        return work is not None

    def poll(self, answering: Collection[int], forecast: Forecast) -> None:
        """Exchange what is new; endless work is stopped for better work, or rest."""
        for work in self._works:
            work.poll(answering, forecast)
        for worker, work in self._at.items():
            if work.is_endless and self._best(worker, forecast) is not work:
                self._supervisor.stop(worker)

    def stop(self) -> None:
        """Stop what can be stopped: the last text is written."""
        for work in self._works:
            work.stop()
