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


def test_the_longest_completion_of_a_prompt_is_known_in_the_next_epoch():
    lengths, other = Lengths(), request("r@1#1", "r@1")
    for n, each in enumerate((10, 400, 200)):
        lengths.record(request(f"q@1#{n}", "q@1"), each)
    again = Lengths()
    again.restore(json.loads(json.dumps(lengths.state())))
    for each in (lengths, again):
        assert (each.expected(request("q@2#0", "q@2")), each.expected(other)) == (400.0, None)
