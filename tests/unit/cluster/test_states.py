"""The states of the workers: allowed changes, present states, and drained spans."""

from collections.abc import Callable
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.states import Span, State, WorkerStates
from longtail.errors import ClusterError

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
    return map(float, count(int(start))).__next__


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
    with pytest.raises(KeyError):
        worker_states.move(8, State.IDLE)


@given(st.lists(moves, min_size=1, max_size=4))
def test_spans_of_any_moves_follow_the_diagram_and_cover_the_time_of_each_worker_once(
    steps: list[list[tuple[int, State]]],
) -> None:
    worker_states = WorkerStates(WORKERS, ticking())
    end_s, states = 0.0, [State.STARTING] * WORKERS
    for attempts in steps:
        for worker, state in attempts:
            if f"{worker_states.state(worker).name}>{state.name}" in ARROWS:
                worker_states.move(worker, state)
        before_s = end_s
        begin_s, end_s, spans = worker_states.drain()
        assert begin_s == before_s
        for worker in range(WORKERS):
            mine = [span for span in spans if span.worker == worker]
            assert [mine[0].begin_s, mine[-1].end_s] == [begin_s, end_s]
            assert all(one.end_s == other.begin_s for one, other in pairwise(mine))
            found = [states[worker], *(span.state for span in mine)]
            arrows = [f"{a.name}>{b.name}" for a, b in pairwise(found) if a is not b]
            assert set(arrows) <= set(ARROWS)
            states[worker] = mine[-1].state
        assert states == [worker_states.state(worker) for worker in range(WORKERS)]
        assert worker_states.workers(*State) == list(range(WORKERS))


def test_a_worker_that_leaves_a_state_at_once_has_no_span_of_it() -> None:
    readings = iter((10.0, 11.0, 12.0, 12.0, 14.0))
    worker_states = WorkerStates(2, readings.__next__)
    worker_states.move(0, State.DEAD)
    worker_states.move(1, State.IDLE)
    worker_states.move(1, State.LEARNING)
    assert worker_states.drain() == (
        10.0,
        14.0,
        (
            Span(worker=0, state=State.STARTING, begin_s=10.0, end_s=11.0),
            Span(worker=0, state=State.DEAD, begin_s=11.0, end_s=14.0),
            Span(worker=1, state=State.STARTING, begin_s=10.0, end_s=12.0),
            Span(worker=1, state=State.LEARNING, begin_s=12.0, end_s=14.0),
        ),
    )
