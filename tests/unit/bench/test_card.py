"""The card of all benchmarks."""

import json

import pytest

from longtail.bench.card import Spread, Table, print_card, ratios


@pytest.mark.parametrize("json_only", [False, True])
def test_the_last_line_is_the_result(capsys, json_only):
    table = Table("title", ["what", "ratio", "none"], [["a", Spread.of([2.0, 4.0, 3.0]), None]])
    print_card([table], {"ratio": 2.5}, json_only=json_only)
    lines = capsys.readouterr().out.strip().splitlines()
    result = json.loads(lines[-1])
    assert result["ratio"] == 2.5
    assert result["environment"]["threads"] >= 1
    assert (len(lines) == 1) == json_only
    assert ("3.00 (2.00-4.00)" in "".join(lines)) != json_only


def test_ratios_are_taken_within_each_pair():
    # The second pair ran on a machine twice as slow.
    assert ratios([1.0, 2.0], [2.0, 4.0]) == Spread(median=0.5, low=0.5, high=0.5)
