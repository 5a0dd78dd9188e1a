"""Timelines, drawn as pictures, and trace.json: the events of each step, over resumed runs."""

import json
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from longtail.cluster.workers.states import Mark, Span, State, Timeline
from longtail.run.trace import TraceFile

LETTERS = {
    "+": State.STARTING, "G": State.GENERATING, ".": State.IDLE, "s": State.SPOT,
    "a": State.AHEAD, "L": State.LEARNING, "x": State.DEAD, "o": State.ABSENT,
}  # fmt: skip


def drawn(*workers: str, begin_s: float = 0.0, marks: tuple[Mark, ...] = ()) -> Timeline:
    """Return the timeline of a picture: one line per worker, one letter per second."""
    spans = []
    for worker, letters in enumerate(workers):
        at = begin_s
        for letter, same in groupby(letters):
            end = at + len(list(same))
            spans.append(Span(worker=worker, state=LETTERS[letter], begin_s=at, end_s=end))
            at = end
    return Timeline(
        spans=tuple(spans), marks=marks, begin_s=begin_s, end_s=begin_s + len(workers[0])
    )


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


def read_trace(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text().removesuffix(",\n") + "]"))


def test_a_trace_holds_the_events_that_perfetto_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1002.0)
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
        "name": "drafter v3 published", "ph": "i", "s": "t", "ts": 1e9 + 1.25e6, "pid": 0, "tid": 1,
        "args": {"step": 7},
    }  # fmt: skip
    path = tmp_path / "trace.json"
    file = TraceFile(path)
    for step, timeline in steps.items():
        file.append(step, timeline)
    file.close()
    assert read_trace(path) == [
        *names,
        whole("generating", 1e9, 2e6, 0, 7),
        whole("generating", 1e9, 1e6, 1, 7),
        whole("spot", 1e9 + 1e6, 1e6, 1, 7),
        instant,
        whole("learning", 1e9 + 2e6, 1e6, 0, 8),
    ]


def test_a_resumed_trace_continues_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    for steps, last_step in ((range(1, 5), None), (range(3, 5), 2)):
        monkeypatch.setattr(time, "time", lambda now=1000.0 * steps[0]: now)
        file = TraceFile(path, last_step=last_step)
        for step in steps:
            file.append(step, drawn("GGGLL", "GssLL", begin_s=50.0 + 5 * step))
        file.close()
        with path.open("ab") as torn:
            torn.write(b'{"name": "spot", "ph": "X", "ts": 2')  # killed while writing
    TraceFile(path, last_step=4).close()
    spans = [each for each in read_trace(path) if each["ph"] == "X"]
    steps_of = [each["args"]["step"] for each in spans]
    assert steps_of == [step for step in (1, 2, 3, 4) for _ in range(5)]
    first = [each["ts"] for each in spans if each["tid"] == 0]
    assert first == sorted(first)
    TraceFile(path).close()
    assert read_trace(path) == [], "a new run begins a new trace"
