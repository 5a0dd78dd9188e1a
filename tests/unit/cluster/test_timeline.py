"""Timelines: the spans of the changes, the metrics of a step, and its events in a file."""

import errno
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from longtail.cluster.timeline import Mark, Timeline, TraceFile, event_of
from longtail.errors import CheckpointError
from support.timelines import drawn


def test_the_metrics_of_a_step_are_seconds_of_its_states() -> None:
    metrics = drawn("GGG.LL", "Glas+L", "GGsxsL", begin_s=2.0).metrics()
    assert metrics == pytest.approx(
        {
            "cluster/generating_s": 6.0,
            "cluster/idle_s": 1.0,
            "cluster/spot_s": 3.0,
            "cluster/learning_ahead_s": 1.0,
            "cluster/lending_s": 1.0,
            "cluster/learning_s": 4.0,
            "cluster/idle_utilization": 1.0,
            "cluster/spot_stop_latency_s": 2.0,
            "cluster/spot_stop_latency_share": 1 / 3,
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


def read_trace(path: Path) -> list[dict[str, Any]]:
    begin, *lines = path.read_bytes().splitlines(keepends=True)
    assert begin == b"[\n"
    return [event for line in lines if (event := event_of(line))]


def test_a_trace_holds_the_events_that_perfetto_reads(tmp_path: Path) -> None:
    marks = (Mark(worker=1, at_s=101.25, name="drafter v3 published"),)
    steps = {7: drawn("GG", "Gs", begin_s=100.0, marks=marks), 8: drawn("L", begin_s=102.0)}

    def whole(name: str, ts: float, dur: float, tid: int, step: int) -> dict[str, Any]:
        place = {"pid": 0, "tid": tid, "args": {"step": step}}
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, **place}

    names = [
        {
            "name": "thread_name", "ph": "M", "pid": 0, "tid": worker,
            "args": {"name": f"worker {worker}", "step": 7},
        }
        for worker in (0, 1)
    ]  # fmt: skip
    instant = {
        "name": "drafter v3 published", "ph": "i", "s": "t", "ts": 1.25e6, "pid": 0, "tid": 1,
        "args": {"step": 7},
    }  # fmt: skip
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    for step, timeline in steps.items():
        file.append(step, timeline)
    file.close()
    assert read_trace(path) == [
        *names,
        whole("generating", 0.0, 2e6, 0, 7),
        whole("generating", 0.0, 1e6, 1, 7),
        whole("spot", 1e6, 1e6, 1, 7),
        instant,
        whole("learning", 2e6, 1e6, 0, 8),
    ]


def timeline(step: int, later_s: float) -> Timeline:
    """Return the timeline of a step by a clock that is ahead by some seconds."""
    begin_s = 50.0 + 5 * step + later_s
    mark = Mark(worker=0, at_s=begin_s + 1.0, name=f"drafter v{step} published")
    return drawn("GGGLL", "GssLL", begin_s=begin_s, marks=(mark,))


def written(path: Path, steps: range, last_step: int | None = None, later_s: float = 0.0) -> None:
    file = TraceFile(path, last_step=last_step)
    for step in steps:
        file.append(step, timeline(step, later_s))
    file.close()


@pytest.mark.parametrize("later_s", [0.0, -1000.0, 1000.0])
def test_a_resumed_trace_continues_after_the_checkpoint(tmp_path: Path, later_s: float) -> None:
    # the clock of the second process starts anew
    path = tmp_path / "trace.json"
    written(path, range(1, 5))
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"name": "spot", "ph": "X", "ts": 2')  # killed while writing
    written(path, range(3, 5), last_step=2, later_s=later_s)
    assert path.read_bytes() == whole
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json"]
    TraceFile(path).close()
    assert read_trace(path) == [], "a new run begins a new trace"


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.close()
    for written in (OSError(errno.ENOSPC, "No space left on device"), 7):
        file._file = Mock(write=Mock(side_effect=[written]))
        with pytest.raises(CheckpointError, match=r"trace.json: .* free some space, then start"):
            file.append(1, timeline(1, 0.0))
