"""The states of the workers, and the changes between them.

                 +-----------------------------------------+
                 v                                         |
    STARTING -> IDLE ---+--> GENERATING  (its shard) ------+
     ^  |  ^            +--> SPOT        (the drafter) ----+
     |  v  |            +--> AHEAD       (finished groups) +
    ABSENT |            +--> LENDING     (its cores) ------+
           |            +--> LEARNING    (the policy) -----+
           |
           +--- DEAD <------ from each of them

All work begins and ends in IDLE: a worker in SPOT is stopped before it is given another task, so to
wait for the workers is to wait for IDLE. `WorkerStates` records the time in each state, from which
the timeline of a step is made (`timeline`). It starts and stops nothing: the pool does.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import final


class State(enum.Enum):
    """The state of a worker."""

    STARTING = "starting"  # its process loads weights
    ABSENT = "absent"  # no host has room for its process
    GENERATING = "generating"  # its engine generates completions
    IDLE = "idle"  # it has no task
    SPOT = "spot"  # it trains the drafter while others generate
    AHEAD = "learning_ahead"  # it learns from finished groups while others generate
    LENDING = "lending"  # its cores compute for a worker that generates; it has no task
    LEARNING = "learning"  # it trains the policy, or does another task of all workers
    DEAD = "dead"  # its process is gone


_WORK = (State.GENERATING, State.SPOT, State.AHEAD, State.LENDING, State.LEARNING)
_FOLLOWERS = {
    **dict.fromkeys(_WORK, (State.IDLE, State.DEAD)),
    State.STARTING: (State.IDLE, State.ABSENT, State.DEAD),
    State.ABSENT: (State.STARTING, State.DEAD),
    State.IDLE: (*_WORK, State.DEAD),
    State.DEAD: (State.STARTING,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """An interval in which a worker was in one state."""

    worker: int
    state: State
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of a worker."""

    worker: int
    at_s: float
    name: str


@final
class WorkerStates:
    """The state of each worker, numbered from 0; all begin in STARTING."""

    def __init__(self, num_workers: int, clock: Callable[[], float]) -> None:
        self._clock, self._begin_s = clock, clock()
        self._states = dict.fromkeys(range(num_workers), (State.STARTING, self._begin_s))
        """Present state of each worker, and when its span began."""
        self._spans: list[Span] = []
        self._marks: list[Mark] = []

    def state(self, worker: int) -> State:
        """Return the state of a worker."""
        return self._states[worker][0]

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in ascending order."""
        return [worker for worker, (state, _) in self._states.items() if state in states]

    def move(self, worker: int, state: State) -> None:
        """Record that a worker entered a state now."""
        present = self.state(worker)
        assert state in _FOLLOWERS[present], f"worker {worker} goes from {present} to {state}"
        self._enter(worker, state, self._clock())

    def mark(self, worker: int, name: str) -> None:
        """Record an event of a worker now."""
        self._marks.append(Mark(worker=worker, at_s=self._clock(), name=name))

    def drain(self) -> tuple[float, float, tuple[Span, ...], tuple[Mark, ...]]:
        """Return begin, end, spans and marks of the time since the last drain, and begin another.

        Spans are ordered by worker, then by time; none is empty.
        """
        begin_s, end_s = self._begin_s, self._clock()
        for worker, (state, _) in self._states.items():
            self._enter(worker, state, end_s)
        spans = tuple(sorted(self._spans, key=lambda span: (span.worker, span.begin_s)))
        marks = tuple(self._marks)
        self._begin_s, self._spans, self._marks = end_s, [], []
        return begin_s, end_s, spans, marks

    def _enter(self, worker: int, state: State, at_s: float) -> None:
        """End the present span of a worker and begin another."""
        present, begin_s = self._states[worker]
        if at_s > begin_s:
            span = Span(worker=worker, state=present, begin_s=begin_s, end_s=at_s)
            self._spans.append(span)
        self._states[worker] = state, at_s
