"""The states of the workers: allowed changes, present states, and drained intervals."""

from collections.abc import Callable, Iterator
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.states import State, StateChange, StateInterval, WorkerStates
from longtail.errors import ClusterError, LongtailError

WORKERS = 3
ARROWS = (
    "STARTING>IDLE", "IDLE>GENERATING", "IDLE>SPOT", "IDLE>LEARNING", "GENERATING>IDLE",
    "SPOT>IDLE", "LEARNING>IDLE", "STARTING>DEAD", "IDLE>DEAD", "GENERATING>DEAD", "SPOT>DEAD",
    "LEARNING>DEAD", "DEAD>STARTING",
)  # fmt: skip
PATHS = {
    State.STARTING: (),
    State.IDLE: (State.IDLE,),
    State.GENERATING: (State.IDLE, State.GENERATING),
    State.SPOT: (State.IDLE, State.SPOT),
    State.LEARNING: (State.IDLE, State.LEARNING),
    State.DEAD: (State.DEAD,),
}

moves = st.lists(st.tuples(st.integers(0, WORKERS - 1), st.sampled_from(State)), max_size=60)


def ticking(start: float = 0.0) -> Callable[[], float]:
    """0.0, 1.0, 2.0, ... a reading each."""
    readings: Iterator[float] = (start + tick for tick in count())
    return lambda: next(readings)


def try_moves(worker_states: WorkerStates, attempts: list[tuple[int, State]]) -> None:
    for worker, state in attempts:
        if f"{worker_states.state(worker).name}>{state.name}" in ARROWS:
            worker_states.move(worker, state)


def replayed(interval: StateInterval) -> tuple[State, ...]:
    """States at a interval's end."""
    states = list(interval.states)
    for change in interval.changes:
        states[change.worker] = change.state
    return tuple(states)


@pytest.mark.parametrize("present", State)
@pytest.mark.parametrize("wanted", State)
def test_the_allowed_changes_are_those_of_the_diagram(present: State, wanted: State) -> None:
    worker_states = WorkerStates(1, ticking())
    for state in PATHS[present]:
        worker_states.move(0, state)
    if f"{present.name}>{wanted.name}" in ARROWS:
        worker_states.move(0, wanted)
        assert worker_states.state(0) is wanted
    else:
        with pytest.raises(ClusterError):
            worker_states.move(0, wanted)
        assert worker_states.state(0) is present


def test_a_refused_change_names_worker_states_reason_and_alternatives() -> None:
    worker_states = WorkerStates(8, ticking())
    worker_states.move(7, State.IDLE)
    worker_states.move(7, State.SPOT)
    with pytest.raises(
        ClusterError,
        match=r"worker 7 cannot go from SPOT to LEARNING \(step 3\); SPOT leads to IDLE, DEAD",
    ):
        worker_states.move(7, State.LEARNING, "step 3")
    assert worker_states.state(7) is State.SPOT
    assert [change.state for change in worker_states.drain().changes] == [State.IDLE, State.SPOT]
    assert issubclass(ClusterError, LongtailError)


def test_an_unknown_worker_is_a_key_error() -> None:
    worker_states = WorkerStates(2, ticking())
    for worker in (2, -1):
        with pytest.raises(KeyError):
            worker_states.move(worker, State.IDLE)


@given(moves)
def test_no_sequence_of_moves_makes_a_change_outside_the_diagram(
    attempts: list[tuple[int, State]],
) -> None:
    worker_states = WorkerStates(WORKERS, ticking())
    for worker, state in attempts:
        try:
            worker_states.move(worker, state)
        except ClusterError:
            continue
    changes = worker_states.drain().changes
    for worker in range(WORKERS):
        states = [State.STARTING]
        states += [change.state for change in changes if change.worker == worker]
        assert all(f"{one.name}>{other.name}" in ARROWS for one, other in pairwise(states))
        assert states[-1] is worker_states.state(worker)


@given(moves)
def test_every_worker_is_in_exactly_one_state_at_any_time(
    attempts: list[tuple[int, State]],
) -> None:
    worker_states = WorkerStates(WORKERS, ticking())
    for attempt in attempts:
        try_moves(worker_states, [attempt])
        found = sorted(worker for state in State for worker in worker_states.workers(state))
        assert found == list(range(WORKERS))
        assert worker_states.workers(*State) == found


@given(st.lists(moves, min_size=1, max_size=4))
def test_drained_intervals_are_contiguous_and_rebuild_the_states(
    steps: list[list[tuple[int, State]]],
) -> None:
    worker_states = WorkerStates(WORKERS, ticking())
    intervals = []
    for attempts in steps:
        try_moves(worker_states, attempts)
        intervals.append(worker_states.drain())
        assert replayed(intervals[-1]) == tuple(worker_states.state(w) for w in range(WORKERS))
    for one, other in pairwise(intervals):
        assert (one.end_s, replayed(one)) == (other.begin_s, other.states)
    for interval in intervals:
        times = [interval.begin_s, *(change.at for change in interval.changes), interval.end_s]
        assert times == sorted(times)


def test_an_interval_holds_the_states_at_its_begin_and_all_changes() -> None:
    worker_states = WorkerStates(2, ticking(start=10.0))
    assert worker_states.workers(State.STARTING) == [0, 1]
    worker_states.move(1, State.IDLE)
    worker_states.move(0, State.DEAD, "lost its process")
    changes = (
        StateChange(worker=1, state=State.IDLE, at=11.0),
        StateChange(worker=0, state=State.DEAD, at=12.0, reason="lost its process"),
    )
    both = (State.STARTING, State.STARTING)
    assert worker_states.drain() == StateInterval(
        begin_s=10.0, end_s=13.0, states=both, changes=changes
    )
    worker_states.move(1, State.GENERATING)
    assert worker_states.drain() == StateInterval(
        begin_s=13.0,
        end_s=15.0,
        states=(State.DEAD, State.IDLE),
        changes=(StateChange(worker=1, state=State.GENERATING, at=14.0),),
    )
