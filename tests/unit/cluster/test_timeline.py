"""Timelines: the spans of the changes, and the metrics of a step."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.states import State, StateChange, StateInterval
from longtail.cluster.timeline import Mark, Span, Timeline
from support.timelines import LETTERS, drawn


def counted(*workers: str) -> dict[str, float]:
    """Count the metrics of a picture second by second."""
    columns = list(zip(*workers, strict=True))
    during = [column for column in columns if "G" in column]
    spot = sum(column.count("s") for column in during)
    idle = sum(column.count(".") for column in during)
    latency = sum("s" in column and "G" not in column for column in columns)
    every = "".join(workers)
    return {
        "cluster/generating_s": every.count("G"),
        "cluster/idle_s": every.count("."),
        "cluster/spot_s": every.count("s"),
        "cluster/learning_s": every.count("L"),
        "cluster/idle_utilization": spot / max(spot + idle, 1),
        "cluster/spot_stop_latency_s": latency,
        "cluster/spot_stop_latency_share": latency / len(columns),
    }


WORKED = (
    "GGGGGGGG..LLLL.",
    "GGG.ssssss.LLL.",
    "GG.........LLLL",
)
pictures = st.integers(1, 20).flatmap(
    lambda width: st.lists(
        st.text("+G.sLx", min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def test_changes_become_contiguous_spans() -> None:
    interval = StateInterval(
        begin_s=10.0,
        end_s=14.0,
        states=(State.IDLE, State.GENERATING),
        changes=(
            StateChange(worker=0, state=State.SPOT, at=11.0),
            StateChange(worker=1, state=State.IDLE, at=12.0),
            StateChange(
                worker=1, state=State.LEARNING, at=12.0
            ),  # at once: idle for no time at all
        ),
    )
    marks = (Mark(worker=1, at_s=11.5, name="drafter v3 published"),)
    assert Timeline.of(interval, marks) == Timeline(
        spans=(
            Span(worker=0, state=State.IDLE, begin_s=10.0, end_s=11.0),
            Span(worker=0, state=State.SPOT, begin_s=11.0, end_s=14.0),
            Span(worker=1, state=State.GENERATING, begin_s=10.0, end_s=12.0),
            Span(worker=1, state=State.LEARNING, begin_s=12.0, end_s=14.0),
        ),
        marks=marks,
        begin_s=10.0,
        end_s=14.0,
    )


@given(pictures)
def test_spans_cover_each_workers_time_once(picture: list[str]) -> None:
    timeline = drawn(*picture, begin_s=3.0)
    for worker, letters in enumerate(picture):
        spans = [span for span in timeline.spans if span.worker == worker]
        edges = [timeline.begin_s, *(span.end_s for span in spans)]
        assert [span.begin_s for span in spans] == edges[:-1]
        assert edges[-1] == timeline.end_s
        assert {
            state: seconds for state, seconds in timeline.seconds()[worker].items() if seconds
        } == {LETTERS[letter]: letters.count(letter) for letter in set(letters)}


def test_the_metrics_of_a_step_are_those_counted_by_hand() -> None:
    timeline = drawn(*WORKED)
    assert timeline.phases == [(0.0, 8.0)]
    # in the phase: worker 1 is idle for 1 s and in spot for 4, worker 2 idle for 6; 2 s of spot
    # are beyond it
    assert timeline.metrics() == pytest.approx(
        {
            "cluster/generating_s": 13.0,
            "cluster/idle_s": 2 + 1 + 1 + 1 + 1 + 9,
            "cluster/spot_s": 6.0,
            "cluster/learning_s": 11.0,
            "cluster/idle_utilization": 4 / 11,
            "cluster/spot_stop_latency_s": 2.0,
            "cluster/spot_stop_latency_share": 2 / 15,
        }
    )


def test_each_rollout_of_a_step_has_a_phase_of_its_own() -> None:
    # an evaluation first: 1 s of latency after it, 2 s after the rollout; idle time between the two
    # is in no phase
    picture = ("GGGG...GGGG..LL", "Gssss..GG.sssLL")
    timeline = drawn(*picture)
    assert timeline.phases == [(0.0, 4.0), (7.0, 11.0)]
    metrics = timeline.metrics()
    assert metrics["cluster/spot_stop_latency_s"] == 3.0
    assert metrics["cluster/idle_utilization"] == pytest.approx(4 / 5)


@given(pictures)
def test_the_metrics_of_any_step_are_those_counted_second_by_second(picture: list[str]) -> None:
    assert drawn(*picture, begin_s=2.0).metrics() == pytest.approx(counted(*picture))


def test_idle_utilization_is_zero_without_idle_time() -> None:
    assert drawn("GGLL", "GGLL").metrics()["cluster/idle_utilization"] == 0.0
    empty = Timeline(spans=(), marks=(), begin_s=1.0, end_s=1.0)
    assert set(empty.metrics().values()) == {0.0}


@given(pictures)
def test_a_timeline_is_restored_from_json_and_begins_at_zero(workers: list[str]) -> None:
    timeline = drawn(*workers)
    row = json.loads(json.dumps(timeline.as_json()))
    restored = Timeline.of_json(row)
    assert restored.as_json() == row
    assert restored.metrics() == pytest.approx(timeline.metrics())
