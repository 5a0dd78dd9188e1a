"""The states of the workers: allowed changes, present states, and drained spans."""

from collections.abc import Callable
from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.workers.states import State, WorkerStates

WORKERS = 3
ARROWS = (
    "STARTING>IDLE", "IDLE>GENERATING", "IDLE>SPOT", "IDLE>LEARNING", "GENERATING>IDLE",
    "IDLE>AHEAD", "AHEAD>IDLE", "AHEAD>DEAD",
    "SPOT>IDLE", "LEARNING>IDLE", "STARTING>DEAD", "IDLE>DEAD", "GENERATING>DEAD", "SPOT>DEAD",
    "LEARNING>DEAD", "DEAD>STARTING", "STARTING>ABSENT", "ABSENT>STARTING", "ABSENT>DEAD",
)  # fmt: skip
moves = st.lists(st.tuples(st.integers(0, WORKERS - 1), st.sampled_from(State)), max_size=60)


def ticking(start: float = 0.0) -> Callable[[], float]:
    """0.0, 1.0, 2.0, ... a reading each."""
    return map(float, count(int(start))).__next__


@given(st.lists(moves, min_size=1, max_size=4))
def test_spans_of_any_moves_follow_the_diagram_and_cover_the_time_of_each_worker_once(steps):
    worker_states = WorkerStates(WORKERS, ticking())
    end_s, states = 0.0, [State.STARTING] * WORKERS
    for attempts in steps:
        for worker, state in attempts:
            if f"{worker_states.state(worker).name}>{state.name}" in ARROWS:
                worker_states.move(worker, state)
            else:
                with pytest.raises(AssertionError):
                    worker_states.move(worker, state)
        before_s = end_s
        timeline = worker_states.drain()
        begin_s, end_s, spans = timeline.begin_s, timeline.end_s, timeline.spans
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
