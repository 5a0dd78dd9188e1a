"""The states of the workers, the changes between them, and the timeline of a step.

                 +-----------------------------------------+
                 v                                         |
    STARTING -> IDLE ---+--> GENERATING  (its shard) ------+
     ^  |  ^            +--> SPOT        (the drafter) ----+
     |  v  |            +--> AHEAD       (finished groups) +
    ABSENT |            +--> LEARNING    (the policy) -----+
           |
           +--- DEAD <------ from each of them

All work begins and ends in IDLE: a worker in SPOT is stopped before it is given another task, so to
wait for the workers is to wait for IDLE. `WorkerStates` records the time in each state, and gives
the timeline of a step. It starts and stops nothing: the pool does.

    worker 0   GGGGGGGGGGGGGGGGGGG . LLLLL          G generating   s spot      a learning ahead
    worker 1   GGGGGGGG . aaaassssss . LLL          . idle         L learning
               |      phase      |st |

A phase is a maximal interval in which a worker generates; a step with an evaluation has several.
Idle utilization is the share of other work in the time that workers do not generate in phases.
Stop latency (st) is the time with a worker in SPOT and none generating: the step waits for it.
"""

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

Interval = tuple[float, float]
"""Begin and end, in seconds."""


class State(enum.Enum):
    """The state of a worker."""

    STARTING = "starting"  # its process loads weights
    ABSENT = "absent"  # no host has room for its process
    GENERATING = "generating"  # its engine generates completions
    IDLE = "idle"  # it has no task
    SPOT = "spot"  # it trains the drafter while others generate
    AHEAD = "learning_ahead"  # it learns from finished groups while others generate
    LEARNING = "learning"  # it trains the policy, or does another task of all workers
    DEAD = "dead"  # its process is gone


_WORK = (State.GENERATING, State.SPOT, State.AHEAD, State.LEARNING)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of a step: each worker's spans are contiguous from `begin_s` to `end_s`."""

    spans: tuple[Span, ...]
    """Spans by worker, then by time; none is empty."""
    marks: tuple[Mark, ...]
    begin_s: float
    end_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the timeline as JSON values; it begins at 0 s.

        Example: {"end_s": 3.0, "spans": [[0, "generating", 0.0, 3.0]], "marks": [[0, 2.5, "..."]]}
        """
        spans = [
            [each.worker, each.state.value, each.begin_s - self.begin_s, each.end_s - self.begin_s]
            for each in self.spans
        ]
        marks = [[each.worker, each.at_s - self.begin_s, each.name] for each in self.marks]
        return {"end_s": self.end_s - self.begin_s, "spans": spans, "marks": marks}

    @property
    def workers(self) -> list[int]:
        """Workers in ascending order."""
        return sorted({span.worker for span in self.spans})

    def seconds(self) -> dict[int, dict[State, float]]:
        """Return the seconds that each worker spent in each state."""
        totals = {worker: dict.fromkeys(State, 0.0) for worker in self.workers}
        for span in self.spans:
            totals[span.worker][span.state] += span.seconds
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step (docs/metrics.md)."""
        totals = self.seconds().values()
        works = (State.SPOT, State.AHEAD)
        named = (State.GENERATING, State.IDLE, *works, State.LEARNING)
        sums = {state: sum((each[state] for each in totals), 0.0) for state in named}
        phases = _joined(self._in_state(State.GENERATING))
        used = sum(self._overlap(state, phases) for state in works)
        idle = self._overlap(State.IDLE, phases)
        generating_or_spot = _joined([*phases, *self._in_state(State.SPOT)])
        latency_s = _length(generating_or_spot) - _length(phases)
        return {f"cluster/{state.value}_s": seconds for state, seconds in sums.items()} | {
            "cluster/idle_utilization": used / (used + idle) if used + idle else 0.0,
            "cluster/spot_stop_latency_s": max(latency_s, 0.0),
        }

    def _in_state(self, state: State) -> list[Interval]:
        return [(span.begin_s, span.end_s) for span in self.spans if span.state is state]

    def _overlap(self, state: State, phases: Sequence[Interval]) -> float:
        """Sum the seconds that all workers were in a state during phases."""
        overlaps = (
            max(min(end, last) - max(begin, first), 0.0)
            for begin, end in self._in_state(state)
            for first, last in phases
        )
        return sum(overlaps, 0.0)


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

    def drain(self) -> Timeline:
        """Return the timeline since the last call, and begin another."""
        begin_s, end_s = self._begin_s, self._clock()
        for worker, (state, _) in self._states.items():
            self._enter(worker, state, end_s)
        spans = tuple(sorted(self._spans, key=lambda span: (span.worker, span.begin_s)))
        timeline = Timeline(spans=spans, marks=tuple(self._marks), begin_s=begin_s, end_s=end_s)
        self._begin_s, self._spans, self._marks = end_s, [], []
        return timeline

    def _enter(self, worker: int, state: State, at_s: float) -> None:
        """End the present span of a worker and begin another."""
        present, begin_s = self._states[worker]
        if at_s > begin_s:
            span = Span(worker=worker, state=present, begin_s=begin_s, end_s=at_s)
            self._spans.append(span)
        self._states[worker] = state, at_s


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch or overlap: (0, 2), (1, 3), (3, 4), (6, 7) -> (0, 4), (6, 7)."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in intervals), 0.0)
