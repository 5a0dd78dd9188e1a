"""Metrics of a trainer's rollouts."""

from dataclasses import replace

import pytest
import torch

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
