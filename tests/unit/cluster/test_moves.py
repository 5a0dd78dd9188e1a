"""Forecasts and moves: a move is chosen only if the step then ends sooner."""

import json
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.forecast import Forecaster, Lengths, TokenTimes, Unfinished
from longtail.cluster.schedule.moves import best_move
from longtail.types import Request
from support.engine_requests import request_of


def request(name: str, group: str = "", max_tokens: int = 1000) -> Request:
    return request_of(name, (1, 2), group=group, max_tokens=max_tokens)


def texts(worker: int, *lefts: float) -> list[Unfinished]:
    return [
        Unfinished(request=request(f"{worker}#{n}"), written=10, left=float(left))
        for n, left in enumerate(lefts)
    ]


def forecast(start_s: float, more_s: float, speeds: Sequence[float] = (1.0, 1.0)) -> Forecaster:
    """Return a forecast that has seen steps of `start_s` + n `more_s` seconds."""
    found = Forecaster(max_running=32)
    found.begin(len(speeds), ())
    for worker, speed in enumerate(speeds):
        found.speeds.observe(worker, 1.0, 100, 100 / speed)
    found.speeds.compare(lambda num: 1.0)
    for n in (1, 2, 4, 8):
        found.times.observe(float(n), 100 * n, 100 * (start_s + n * more_s), 0)
    return found


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.integers(1, 64))
def test_seconds_of_a_token_are_learned_from_exact_observations(start_s, more_s, num_running):
    found = forecast(start_s, more_s).times
    assert found.seconds(float(num_running)) == pytest.approx(
        start_s + more_s * num_running, rel=1e-6
    )


def test_a_moment_without_tokens_counts_by_its_seconds_and_no_more():
    found = TokenTimes()
    for num_tokens, seconds in ((400, 10.0), (4, 1.0)):
        found.observe(4.0, num_tokens, seconds, 0)
    assert found.seconds(4.0) == pytest.approx(11.0 / 101, rel=0.01)


def test_what_is_seen_beside_other_work_is_its_cost_and_no_speed():
    found = TokenTimes()
    assert found.slowdown == 0.0
    found.observe(4.0, 400, 10.0, 0)
    usual = found.seconds(4.0)
    lost = found.observe(4.0, 400, 12.5, 2)
    assert lost == pytest.approx(2.5)
    assert found.slowdown == pytest.approx(2.5 / 25.0)
    assert found.seconds(4.0) == usual


def test_lengths_follow_siblings_then_the_epoch_before_then_all_texts():
    lengths = Lengths()
    one, other = request("p@1#1", "p@1"), request("r@1#1", "r@1")
    lengths.begin(
        [one, other, *(request(f"q@1#{n}", "q@1") for n in range(3)), request("p@1#2", "p@1")]
    )
    assert lengths.left(one, 0) == 500.0
    for n, each in enumerate((10, 200, 400)):
        lengths.record(f"q@1#{n}", each)
    assert lengths.left(one, 100) == 200.0
    lengths.restore({"longest": {"p": 150}})
    assert lengths.left(one, 100) == 50.0
    assert lengths.left(other, 100) == 200.0
    lengths.record("p@1#2", 120)
    assert lengths.left(one, 100) == 20.0
    assert lengths.left(other, 990) == 5.0
    lengths.begin([one])
    assert lengths.left(one, 100) == 50.0
    again = Lengths()
    again.restore(json.loads(json.dumps(lengths.state())))
    assert (again.expected(request("p@2#0", "p@2")), again.expected(other)) == (150.0, None)


def test_where_each_text_costs_the_busiest_worker_shares_with_an_idle_one():
    move = best_move({0: texts(0, 500, 400, 300, 200)}, [1], 0.0, forecast(0.0, 0.01))
    assert move is not None
    assert (move.source, move.target, move.names) == (0, 1, ("0#1", "0#3"))
    assert move.gain_s > 1.0


def test_where_a_step_costs_as_much_for_one_text_none_moves():
    assert best_move({0: texts(0, 500, 500)}, [1], 0.0, forecast(0.01, 0.0)) is None


def test_a_worker_hands_its_texts_over_if_it_has_something_to_learn():
    loads = {0: texts(0, 500, 400), 1: texts(1, 450)}
    cheap = forecast(0.01, 1e-5)
    assert best_move(loads, [], 0.0, cheap) is None
    move = best_move(loads, [], 4.0, cheap)
    assert move is not None
    assert (move.source, move.target, move.names) == (1, 0, ("1#0",))
    assert best_move(loads, [], 4.0, forecast(1e-5, 0.01)) is None


def test_a_slow_worker_keeps_texts_by_its_speed_and_hands_its_last_one_to_a_faster_one():
    slow = forecast(0.0, 0.01, (1.0, 0.5))
    move = best_move({1: texts(1, 500, 400, 300)}, [0], 0.0, slow)
    assert move is not None
    assert (move.source, move.target, move.names) == (1, 0, ("1#0", "1#2"))
    for loads, idle in (({1: texts(1, 500)}, [0]), ({0: texts(0, 300), 1: texts(1, 500)}, [])):
        move = best_move(loads, idle, 0.0, forecast(0.01, 1e-4, (1.0, 0.5)))
        assert move is not None
        assert (move.source, move.target, move.names) == (1, 0, ("1#0",))
        assert best_move(loads, idle, 0.0, forecast(0.01, 1e-4)) is None


@given(
    st.lists(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=8), min_size=1, max_size=5),
    st.integers(0, 3),
    st.floats(0.0, 50.0),
    st.floats(0.0, 0.05),
    st.floats(0.0, 0.05),
    st.lists(st.sampled_from((1.0, 0.5, 0.3)), min_size=8, max_size=8),
)
def test_a_move_gains_what_it_promises(loads, num_idle, early_s, start_s, more_s, speeds):
    known = forecast(start_s + 1e-6, more_s, speeds)
    given_loads = {worker: texts(worker, *lefts) for worker, lefts in enumerate(loads)}
    idle = list(range(len(loads), len(loads) + num_idle))
    move = best_move(given_loads, idle, early_s, known)
    if move is None:
        return
    after = {worker: list(own) for worker, own in given_loads.items()}
    moved = [each for each in after[move.source] if each.request.request_id in move.names]
    after[move.source] = [each for each in after[move.source] if each not in moved]
    reading_s = known.reading_s(move.target, moved)
    assert moved
    assert move.target != move.source

    def end_s(of, extra):
        seconds = [known.worker_s(worker, own) + (extra if worker == move.target else 0.0)
                   for worker, own in of.items()]  # fmt: skip
        longest = max(seconds)
        spare = (len(loads) + num_idle) * longest - math.fsum(seconds)
        return longest - min(early_s, spare) / (len(loads) + num_idle)

    after.setdefault(move.target, [])
    after[move.target] += moved
    assert move.gain_s == pytest.approx(end_s(given_loads, 0.0) - end_s(after, reading_s))
    assert move.gain_s > 0.0
