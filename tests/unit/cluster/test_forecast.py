"""Forecasts follow what was measured."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.forecast import Lengths, TokenTimes
from longtail.types import Request
from support.engine_requests import request_of


def request(name: str, group: str = "", max_tokens: int = 1000) -> Request:
    return request_of(name, (1, 2), group=group, max_tokens=max_tokens)


@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.integers(1, 64))
def test_seconds_of_a_token_are_learned_from_exact_observations(start_s, more_s, num_running):
    found = TokenTimes()
    for n in (1, 2, 4, 8):
        found.observe(float(n), 100 * n, 100 * (start_s + n * more_s), 1)
    assert found.seconds(float(num_running)) == pytest.approx(
        start_s + more_s * num_running, rel=1e-6
    )


def test_a_moment_without_tokens_counts_by_its_seconds_and_no_more():
    found = TokenTimes()
    for num_tokens, seconds in ((400, 10.0), (4, 1.0)):
        found.observe(4.0, num_tokens, seconds, 1)
    assert found.seconds(4.0) == pytest.approx(11.0 / 101, rel=0.01)


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
