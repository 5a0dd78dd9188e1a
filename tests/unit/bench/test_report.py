"""Benchmarks take turns, and end with one line that machines read."""

import json

import pytest

from longtail.bench.common.report import Spread, finish, paired, ratios


def test_contestants_take_turns_and_the_warm_up_is_thrown_away():
    calls: list[str] = []

    def timed_itself(name: str, seconds: float) -> float:
        calls.append(name)
        return seconds + len(calls)

    found = paired(
        {"a": lambda: timed_itself("a", 0.0), "b": lambda: timed_itself("b", 100.0)},
        repeats=2,
        warmup=1,
    )
    assert calls == ["a", "b"] * 3
    assert found == {"a": [3.0, 5.0], "b": [104.0, 106.0]}


def test_a_function_without_a_clock_is_timed_from_outside():
    found = paired({"a": lambda: None}, repeats=3)
    assert len(found["a"]) == 3
    assert all(0 <= seconds < 60 for seconds in found["a"])


def test_ratios_are_taken_within_each_pair():
    # The second pair ran on a machine twice as slow: the ratio is the same.
    assert ratios([2.0, 4.0, 3.0], [1.0, 2.0, 1.0]) == Spread(median=2.0, low=2.0, high=3.0)


@pytest.mark.parametrize("json_only", [False, True])
def test_the_last_line_is_the_result(capsys, json_only):
    finish("title", ["what", "how"], [["a", "1"]], {"ratio": 2.5}, json_only=json_only)
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["ratio"] == 2.5
    assert result["environment"]["threads"] >= 1
    assert (len(lines) == 1) == json_only
