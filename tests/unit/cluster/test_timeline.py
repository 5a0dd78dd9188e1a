"""Timelines: the spans of the changes, and the metrics of a step."""

import pytest

from longtail.cluster.workers.states import Mark, Timeline
from support.timelines import drawn


def test_the_metrics_of_a_step_are_seconds_of_its_states() -> None:
    metrics = drawn("GGG.LL", "Gaas+L", "GGsxsL", begin_s=2.0).metrics()
    assert metrics == pytest.approx(
        {
            "cluster/generating_s": 6.0,
            "cluster/idle_s": 1.0,
            "cluster/spot_s": 3.0,
            "cluster/learning_ahead_s": 2.0,
            "cluster/learning_s": 4.0,
            "cluster/idle_utilization": 1.0,
            "cluster/spot_stop_latency_s": 2.0,
        }
    )
    assert drawn("GGLL", "GGLL").metrics()["cluster/idle_utilization"] == 0.0
    empty = Timeline(spans=(), marks=(), begin_s=1.0, end_s=1.0)
    assert set(empty.metrics().values()) == {0.0}


def test_a_timeline_in_json_begins_at_zero() -> None:
    mark = Mark(worker=1, at_s=2.5, name="drafter v1 offered")
    assert drawn("GL", "ss", begin_s=2.0, marks=(mark,)).as_json() == {
        "end_s": 2.0,
        "spans": [[0, "generating", 0.0, 1.0], [0, "learning", 1.0, 2.0], [1, "spot", 0.0, 2.0]],
        "marks": [[1, 0.5, "drafter v1 offered"]],
    }
