"""Cores as idle work: a worker without texts lends its own to one that writes.

    IDLE ---> LENDING, to the worker of its host that will be done last ---> IDLE, at once

The borrower computes its steps on more threads, which changes no bit of a text (law 4) and leaves
the threads of its learner alone. A lender has no task, so any other work may begin at once.
"""

from typing import final

from longtail.cluster.records import Forecast
from longtail.cluster.work.work import IdleWork
from longtail.cluster.workers.states import State
from longtail.cluster.workers.supervisor import WorkerSupervisor
from longtail.cluster.workers.worker import Worker


@final
class LendingWork(IdleWork):
    """The cores that are lent in one rollout; `lends` has the borrower of each lender."""

    def __init__(self, supervisor: WorkerSupervisor, lends: dict[int, int]) -> None:
        self._supervisor, self._lends = supervisor, lends

    def rate(self, worker: int, forecast: Forecast) -> float:
        """Return the gain of the worker's loan; 0 if its borrower generates no more."""
        loan = forecast.loans.get(worker)
        is_possible = loan is not None and self._is_generating(loan.borrower)
        return loan.rate if loan is not None and is_possible else 0.0

    def start(self, worker: int, forecast: Forecast) -> None:
        """Lend the cores of an idle worker."""
        borrower = forecast.loans[worker].borrower
        self._supervisor.states.move(worker, State.LENDING)
        self._lends[worker] = borrower
        self._tell(borrower)

    def end(self, worker: int) -> None:
        """Take the cores back; the worker is idle."""
        self._supervisor.states.move(worker, State.IDLE)
        self._tell(self._lends.pop(worker))

    def on_lost(self, worker: int) -> None:
        """Forget a lost lender."""
        if (borrower := self._lends.pop(worker, None)) is not None:
            self._tell(borrower)

    def _is_generating(self, worker: int) -> bool:
        return worker in self._supervisor.workers(State.GENERATING)

    def _tell(self, borrower: int) -> None:
        if self._is_generating(borrower):
            num = list(self._lends.values()).count(borrower)
            self._supervisor.tell(borrower, Worker.borrow_cores, num)
