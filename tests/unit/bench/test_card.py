"""Benchmarks take turns, and end with one line of JSON."""

import json

import pytest

from longtail.bench.common.card import Table, print_card
from longtail.bench.common.timing import paired


def test_contestants_run_in_turns_and_the_warm_up_is_discarded():
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
    timed_outside = paired({"a": lambda: None}, repeats=3)["a"]
    assert len(timed_outside) == 3


@pytest.mark.parametrize("json_only", [False, True])
def test_the_last_line_is_the_result(capsys, json_only):
    table = Table("title", ["what"], [["a"]])
    print_card([table], {"ratio": 2.5}, json_only=json_only)
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["ratio"] == 2.5
    assert result["environment"]["threads"] >= 1
    assert (len(lines) == 1) == json_only
