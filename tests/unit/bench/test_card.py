"""Benchmarks take turns, and end with one line of JSON."""

import json

import pytest

from longtail.bench.common.card import Table, print_card
from longtail.bench.common.timing import Spread, paired, ratios


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


def test_ratios_are_taken_within_each_pair():
    # The second pair ran on a machine twice as slow: the ratio is the same.
    assert ratios([2.0, 4.0, 3.0], [1.0, 2.0, 1.0]) == Spread(median=2.0, low=2.0, high=3.0)


def test_a_cell_is_written_as_its_kind():
    spread = Spread(median=1.5, low=1.0, high=2.0)
    rows = [("a", 0.126), ("b", spread), ("c", None), ("d", 7)]
    table = Table("title", ("name", "value"), rows)
    expected = [["a", "0.13"], ["b", "1.50 (1.00-2.00)"], ["c", ""], ["d", "7"]]
    assert table.cells() == expected


@pytest.mark.parametrize("json_only", [False, True])
def test_the_last_line_is_the_result(capsys, json_only):
    table = Table("title", ["what"], [["a"]])
    print_card([table], {"ratio": 2.5}, json_only=json_only)
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["ratio"] == 2.5
    assert result["environment"]["threads"] >= 1
    assert (len(lines) == 1) == json_only
