"""The states of the workers, and the changes between them.

                 +-----------------------------------------+
                 v                                         |
    STARTING -> IDLE ---+--> GENERATING  (its shard) ------+
       ^                +--> SPOT        (the drafter) ----+
       |                +--> LEARNING    (the policy) -----+
       |
       +------- DEAD <------ from each of them

All work begins and ends in IDLE: a worker in SPOT is stopped before it is given another task, so to
wait for the workers is to wait for IDLE. `WorkerStates` records each change with its time, from
which the timeline of a step is made (`timeline`). It starts and stops nothing: the supervisor does.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from longtail.errors import ClusterError


class State(enum.Enum):
    """The state of a worker."""

    STARTING = "starting"
    """Its process loads weights."""
    GENERATING = "generating"
    """Its engine generates completions."""
    IDLE = "idle"
    """It has no task."""
    SPOT = "spot"
    """It trains the drafter while others generate."""
    LEARNING = "learning"
    """It trains the policy, or does another task of all workers."""
    DEAD = "dead"
    """Its process is gone."""


_FOLLOWERS = {
    State.STARTING: (State.IDLE, State.DEAD),
    State.IDLE: (State.GENERATING, State.SPOT, State.LEARNING, State.DEAD),
    State.GENERATING: (State.IDLE, State.DEAD),
    State.SPOT: (State.IDLE, State.DEAD),
    State.LEARNING: (State.IDLE, State.DEAD),
    State.DEAD: (State.STARTING,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """A worker entered a state.

    Example: StateChange(worker=1, state=State.SPOT, at=17.25, reason="1,024 tokens wait")
    """

    worker: int
    state: State
    at: float
    """Seconds by the clock of the `WorkerStates`."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateInterval:
    """The states of all workers at the begin of an interval, and the changes in it.

    Intervals of one `WorkerStates` are contiguous: the next one begins where this one ends.

    Example: StateInterval(begin_s=17.0, end_s=19.5, states=(State.GENERATING, State.IDLE),
                           changes=(StateChange(worker=1, state=State.SPOT, at=17.25),))
    """

    begin_s: float
    end_s: float
    states: tuple[State, ...]
    """State of each worker at `begin_s`."""
    changes: tuple[StateChange, ...]
    """Changes in the order in which they were made."""


@final
class WorkerStates:
    """The state of each worker, numbered from 0; all begin in STARTING.

    A change that the diagram above does not show is refused and changes nothing.
    """

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._states = dict.fromkeys(range(num_workers), State.STARTING)
        self._drained_s, self._drained = clock(), tuple(self._states.values())
        self._changes: list[StateChange] = []

    def state(self, worker: int) -> State:
        """Return the state of a worker."""
        return self._states[worker]

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in ascending order."""
        return [worker for worker, state in self._states.items() if state in states]

    def move(self, worker: int, state: State, reason: str = "") -> None:
        """Record that a worker entered a state now.

        Raises ClusterError if its present state does not lead there.
        """
        present = self._states[worker]
        if state not in _FOLLOWERS[present]:
            allowed = ", ".join(follower.name for follower in _FOLLOWERS[present])
            raise ClusterError(
                f"worker {worker} cannot go from {present.name} to {state.name}"
                + (f" ({reason})" if reason else "")
                + f"; {present.name} leads to {allowed}"
            )
        self._states[worker] = state
        self._changes.append(
            StateChange(worker=worker, state=state, at=self._clock(), reason=reason)
        )

    def drain(self) -> StateInterval:
        """Return the interval since the last drain, or since construction, and begin another."""
        interval = StateInterval(
            begin_s=self._drained_s,
            end_s=self._clock(),
            states=self._drained,
            changes=tuple(self._changes),
        )
        self._drained_s, self._drained = interval.end_s, tuple(self._states.values())
        self._changes.clear()
        return interval
