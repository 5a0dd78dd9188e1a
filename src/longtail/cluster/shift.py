"""Keeping a crew at work: every worker's state, what is started and ended, who is lost or hangs.

A lost worker is replaced at once, beside whatever the others do: its process is begun anew, given
the policy of a colleague, and stands idle. What it was doing is for the caller to hand out again.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from longtail.cluster.crew import Crew, Ended
from longtail.cluster.roster import Roster, State
from longtail.cluster.worker import PolicyState, Worker
from longtail.errors import ClusterError

_READY_S = 600.0
"""For a worker to begin: a large model is read from disk."""
_MOST_LOSSES = 5
"""Workers lost in a row, with nothing achieved between, that end the run."""


@dataclass(frozen=True, slots=True)
class _Job:
    task: Callable[..., object]
    args: tuple[Any, ...]


@final
class Shift:
    """Owns the roster; moves a worker whenever it starts or ends something."""

    def __init__(self, crew: Crew, hang_s: float, say: Callable[[str], None]) -> None:
        self.crew, self.roster = crew, Roster(crew.size)
        self._hang_s, self._say = hang_s, say
        self._jobs: dict[int, deque[_Job]] = {}
        """What a worker that is starting has still to do."""
        self._beats: dict[int, tuple[int, float]] = {}
        self._losses = 0
        self.is_team_stale = True
        """Somebody has never met the others."""
        self.newcomers: set[int] = set()
        """Replaced ones, whose drafter is that of the beginning; who sees to it takes them out."""

    def start(self, worker: int, state: State, task: Callable[..., object], *args: object) -> None:
        """Begin a task that puts an idle worker into a state."""
        self.crew.ask(worker, Worker.go)
        self.roster.move(worker, state)
        self._beats.pop(worker, None)
        self.crew.start(worker, task, *args)

    def wait(self, timeout_s: float) -> list[Ended]:
        """Return what has ended, its worker idle; the lost ones are being replaced."""
        found = []
        for ended in self.crew.wait(timeout_s):
            if self.roster.state(ended.worker) is State.STARTING:
                self._go_on_starting(ended)
                continue
            if ended.is_lost:
                self.lose(ended.worker, str(ended.error))
            else:
                self._losses = 0
                self.roster.move(ended.worker, State.IDLE)
            found.append(ended)
        return found

    def wait_ready(self) -> None:
        """Wait until nobody is starting any more."""
        began = time.monotonic()
        while self.roster.workers(State.STARTING):
            self.wait(0.5)
            if time.monotonic() - began > _READY_S:
                late = self.roster.workers(State.STARTING)
                raise ClusterError(f"workers {late} did not begin within {_READY_S:.0f} s")

    def each(self, state: State, task: Callable[..., object], *args: object) -> dict[int, Ended]:
        """Have everybody do the same; return how it ended for each, lost workers included."""
        self.wait_ready()
        waiting = set(range(self.crew.size))
        for worker in sorted(waiting):
            self.start(worker, state, task, *args)
        found: dict[int, Ended] = {}
        while waiting - found.keys():
            found.update((ended.worker, ended) for ended in self.wait(0.5))
            # How long it takes nobody knows until the first one is done.
            for worker in self.hanging(waiting - found.keys()) if found else ():
                error = ClusterError(f"worker {worker} made no step for {self._hang_s:.0f} s")
                self.lose(worker, str(error))
                found[worker] = Ended(worker=worker, error=error, is_lost=True)
        return found

    def hanging(self, workers: set[int]) -> list[int]:
        """List those whose beats have stood still for too long; ask now and then."""
        found, now = [], time.monotonic()
        for worker in sorted(workers):
            try:
                beats = self.crew.ask(worker, Worker.progress).beats
            except ClusterError:
                beats = -1  # a process that is gone also ends its task: no need to hurry
            seen, since = self._beats.get(worker, (-2, now))
            if beats != seen:
                self._beats[worker] = (beats, now)
            elif now - since > self._hang_s:
                found.append(worker)
        return found

    def lose(self, worker: int, reason: str) -> None:
        """Strike a worker off and begin another in its place."""
        self._losses += 1
        self._say(f"{reason}; it is replaced, and what it was doing is done again")
        self.roster.move(worker, State.DEAD, reason)
        if self._losses > _MOST_LOSSES:
            raise ClusterError(
                f"{self._losses} workers were lost in a row, the last with: {reason}; mend that, "
                "then start again: the run resumes from its newest checkpoint"
            )
        if self.crew.size == 1:
            raise ClusterError(
                f"the only worker is lost ({reason}); start again: the run resumes from its "
                "newest checkpoint"
            )
        self.crew.replace(worker)
        self.roster.move(worker, State.STARTING)
        self.newcomers.add(worker)
        self._jobs[worker] = deque()
        self.is_team_stale = True

    def policy_of_a_colleague(self, worker: int) -> PolicyState:
        """Copy the policy of somebody who has it. Raises ClusterError if nobody is left."""
        healthy = self.roster.workers(State.IDLE, State.GENERATING, State.SPOT)
        for other in healthy:
            if other != worker:
                try:
                    return self.crew.ask(other, Worker.policy_state)
                except ClusterError:
                    continue
        raise ClusterError(
            f"worker {worker} is lost and nobody is left who has the policy; start again: the run "
            "resumes from its newest checkpoint"
        )

    def _go_on_starting(self, ended: Ended) -> None:
        """After `ready`: restore, then publish, then idle."""
        worker = ended.worker
        if ended.is_lost:
            self.lose(worker, str(ended.error))
            return
        if ended.error is not None:
            raise ended.error
        jobs = self._jobs.pop(worker, None)
        if jobs is None:  # at the very beginning there is nothing to restore
            self.roster.move(worker, State.IDLE)
            return
        if not jobs:
            jobs.append(_Job(Worker.restore, (self.policy_of_a_colleague(worker),)))
            jobs.append(_Job(Worker.publish, ()))
        job = jobs.popleft()
        self.crew.start(worker, job.task, *job.args)
        if jobs:
            self._jobs[worker] = jobs


def served_by(found: Mapping[int, Ended]) -> dict[int, Any]:
    """Return the results of those that are not lost; raise the first error of any of them."""
    return {worker: ended.value() for worker, ended in found.items() if not ended.is_lost}
