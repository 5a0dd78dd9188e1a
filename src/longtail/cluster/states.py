"""The states of the workers, and which changes between them there are.

                 +-----------------------------------------+
                 v                                         |
    STARTING -> IDLE ---+--> GENERATING  (its shard) ------+
       ^                +--> SPOT        (the drafter) ----+
       |                +--> LEARNING    (the policy) -----+
       |
       +------- DEAD <------ from each of them

All work begins and ends in IDLE: a worker in SPOT is asked back before it is given anything else,
so whoever waits for the workers waits for IDLE alone. A states records each change with its time;
what a step looked like is made of that (`timeline`). It moves nobody: the coordinator does, and
says so here.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from longtail.errors import ClusterError


class State(enum.Enum):
    """What a worker is doing."""

    STARTING = "starting"
    """Its process loads weights."""
    GENERATING = "generating"
    """Its engine writes completions."""
    IDLE = "idle"
    """It waits to be told."""
    SPOT = "spot"
    """It trains the drafter while others generate."""
    LEARNING = "learning"
    """It trains the policy."""
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
    """By the states's clock."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """All that happened between two moments: where each worker stood at the first, and the changes.

    Stretches of one states meet: the next begins where this one ends, in the states it ends in.

    Example: Stretch(begin_s=17.0, end_s=19.5, states=(State.GENERATING, State.IDLE),
                     changes=(StateChange(worker=1, state=State.SPOT, at=17.25),))
    """

    begin_s: float
    end_s: float
    states: tuple[State, ...]
    """Of each worker at `begin_s`."""
    changes: tuple[StateChange, ...]
    """In the order they were made."""


@final
class WorkerStates:
    """Keeps the state of each worker; every one begins in STARTING.

    Workers are numbered from 0. A change that is not in the picture above is refused and leaves
    everything as it was.
    """

    def __init__(self, num_workers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._drained_s = clock()
        self._states = dict.fromkeys(range(num_workers), State.STARTING)
        self._since = dict.fromkeys(range(num_workers), self._drained_s)
        self._drained = tuple(self._states.values())
        self._changes: list[StateChange] = []

    @property
    def changes(self) -> tuple[StateChange, ...]:
        """Changes that were not drained yet."""
        return tuple(self._changes)

    def state(self, worker: int) -> State:
        """Return the state a worker is in."""
        return self._states[worker]

    def since(self, worker: int) -> float:
        """Return when a worker entered its state."""
        return self._since[worker]

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in rising order."""
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
        now = self._clock()
        self._states[worker], self._since[worker] = state, now
        self._changes.append(StateChange(worker=worker, state=state, at=now, reason=reason))

    def drain(self) -> Stretch:
        """Hand out what happened since the last drain, or since the beginning, and forget it."""
        now = self._clock()
        stretch = Stretch(
            begin_s=self._drained_s, end_s=now, states=self._drained, changes=self.changes
        )
        self._drained_s, self._drained = now, tuple(self._states.values())
        self._changes.clear()
        return stretch
