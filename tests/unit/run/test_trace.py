"""trace.json: the events of each step, over resumed runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from longtail.cluster.workers.states import Mark, Timeline
from longtail.run.trace import TraceFile
from support.timelines import drawn


def read_trace(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text().removesuffix(",\n") + "]"))


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
