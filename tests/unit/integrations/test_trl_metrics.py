"""Metrics of a trainer's rollouts, sums over processes, and the figures of `longtail bench trl`."""

from dataclasses import replace

import pytest
import torch

from longtail.bench.trl import Arm, compare
from longtail.engine.report import RolloutMeter
from longtail.integrations.trl.host import Ranks
from longtail.integrations.trl.session import SessionMetrics


def test_metrics_are_means_of_the_rollouts_since_the_last_log() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    metrics = SessionMetrics(ranks)
    report = replace(
        RolloutMeter().report(), num_generated=30, num_drafted=20, num_accepted=6, num_verified=10
    )
    assert metrics.drain() == {}
    for seconds in (2.0, 4.0):
        ranks.add("rollouts", 1.0)
        metrics.add(report, seconds)
    found = metrics.drain()
    assert found["timing_s/gen"] == pytest.approx(3.0)
    assert found["rollout/generated_tokens"] == pytest.approx(30.0)
    assert found["rollout/tokens_per_s"] == pytest.approx(10.0)
    assert found["rollout/spec_accept_length"] == pytest.approx(1.6)
    assert found["rollout/spec_accept_rate"] == pytest.approx(0.3)
    assert metrics.drain() == {}


def test_figures_of_the_bench_compare_common_steps() -> None:
    def step(gen_s: float, texts: list[str], gap: float | None) -> dict[str, object]:
        return {
            "gen_s": gen_s,
            "step_s": gen_s + 10,
            "texts": texts,
            "tokens": 5,
            "logprob_gap": gap,
        }

    found = compare(
        {
            "trl": Arm("trl", [step(50.0, ["x"], None)]),
            "none": Arm("none", [step(10.0, ["a"], 1e-7), step(8.0, ["b"], 2e-7)]),
            "auto": Arm("auto", [step(5.0, ["a"], 1e-7), step(4.0, ["c"], 3e-7)]),
        }
    )
    assert found["generation_ratio"] == 10.0
    assert found["step_ratio"] == 4.0
    assert found["drafter_ratio"] == 2.0
    assert found["differing_share"] == 0.5
    assert found["logprob_gap"] == 3e-7
    assert all("texts" not in each for arm in found["arms"].values() for each in arm)
