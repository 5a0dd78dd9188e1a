"""`longtail bench e2e`: its ratios are those it names; its options are checked."""

import argparse
import json
import subprocess
import sys

import pytest

from longtail.bench import e2e_card as card
from longtail.bench.e2e_arms import ArmResult, differing_share
from longtail.bench.e2e_setting import Setting, add_arguments, read_setting
from longtail.errors import ConfigError


def parse(*words: str) -> Setting:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_setting(parser.parse_args(list(words)))


def arm(rollouts: list[float], others: float, **texts: str) -> ArmResult:
    """Steps of so many seconds of rollout, and some of everything else."""
    rows = [
        {
            "timing_s/rollout": rollout,
            "timing_s/step": rollout + others,
            "reward/mean": 0.5,
            "cluster/generating_s": rollout,
            "cluster/idle_s": rollout / 2,
            "cluster/spot_s": rollout / 2,
            "cluster/harvested_share": 0.5,
            "cluster/stolen_s": 0.1 * index,
            "speculation/accept_length": 3.0 + index,
        }
        for index, rollout in enumerate(rollouts)
    ]
    return ArmResult(metrics=rows, texts=texts)


FOUND = {
    "off": arm([8.0, 4.0, 6.0], 2.0, a="one", b="two"),
    "spot": arm([2.0, 2.0, 2.0], 2.0, a="one", b="three"),
}


def test_ratios_are_taken_step_by_step() -> None:
    found = card.as_json(parse("--arms", "off,spot"), FOUND)
    assert found["rollout_speedup"]["spot"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert found["step_speedup"]["spot"] == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert found["differing_share"] == {"spot": 0.5}
    assert found["rewards_agree"] is True
    assert found["harvested_share"] == 0.5
    assert found["stop_latency_s"] == {"median": 0.1, "max": 0.2}
    assert found["accept_length"] == {"spot": [3.0, 4.0, 5.0]}
    assert found["idle_share"]["off"] == 0.5
    json.dumps(found)


def test_a_reward_that_differs_is_told() -> None:
    other = arm([2.0, 2.0, 2.0], 2.0)
    other.metrics[1]["reward/mean"] = 0.25
    assert not card.as_json(parse("--quick"), {**FOUND, "spot": other})["rewards_agree"]


def test_the_card_has_a_line_for_each_arm_in_both_tables() -> None:
    for title, columns, rows in card.tables(parse("--arms", "off,spot"), FOUND):
        assert "2 workers" in title or "Seconds" in title
        assert [row[0] for row in rows] == ["off", "spot"]
        assert {len(row) for row in rows} == {len(columns)}


def test_only_texts_that_both_wrote_are_compared() -> None:
    assert differing_share(arm([], 0.0, a="x", b="y"), arm([], 0.0, b="y", c="z")) == 0.0
    assert differing_share(arm([], 0.0), arm([], 0.0)) == 0.0


def test_all_arms_have_the_same_seed_and_steps() -> None:
    setting = parse("--steps", "7", "--workers", "3", "--dtype", "float64")
    assert setting.arms == ("off", "history", "frozen", "serial", "spot", "cold")
    assert {"--run.steps=7", "--cluster.workers=3", "--learner.dtype=float64"} <= {*setting.words}
    assert parse("--quick").arms == ("off", "spot")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--arms", "off,warm"), "--arms: 'warm' is not one of off"),
        (("--arms", "spot,off"), "--arms = 'spot,off': off comes first"),
        (("--steps", "-1"), "--steps = -1: it must be at least 1"),
        (("--workers", "0"), "--workers = 0: it must be at least 1"),
    ],
)
def test_an_impossible_option_is_refused_by_name(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_declaring_the_options_needs_no_torch() -> None:
    code = "import sys, longtail.bench.e2e; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
