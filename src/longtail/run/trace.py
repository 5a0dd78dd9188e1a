"""trace.json: the states of the workers for Perfetto, with the events of each step.

It is an array of Chrome's trace events without its closing bracket, which the format allows. Times
are microseconds since 1970, so that those of a resumed run follow.

    [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "worker 1", "step": 1}},
    {"name": "spot", "ph": "X", "ts": 2e6, "dur": 5e5, "pid": 0, "tid": 1, "args": {"step": 1}},
    {"name": "drafter v3 published", "ph": "i", "s": "t", "ts": 2.2e6, "pid": 0, "tid": 1,
     "args": {"step": 1}},
"""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from longtail.cluster.workers.states import Timeline
from longtail.run.metrics_log import JsonLines, is_number

TRACE_FILE = "trace.json"


@final
class TraceFile:
    """The trace of a run, on disk after each step; opened after `last_step`, the checkpoint's."""

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        self._file = JsonLines(path, last_step=last_step, head=b"[\n")
        self._named = set[int]()
        """Workers whose names this process has written."""
        self._offset_s: float | None = None
        """Seconds from the timelines' clock to 1970's."""

    def append(self, step: int, timeline: Timeline) -> None:
        """Write the events of a step, now. Raises CheckpointError when the disk refuses."""
        if self._offset_s is None:
            self._offset_s = time.time() - timeline.end_s
        events = self._events(step, timeline, self._offset_s)
        self._file.append("".join(f"{json.dumps(each)},\n" for each in events).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _events(self, step: int, timeline: Timeline, offset_s: float) -> Iterator[dict[str, Any]]:
        """Yield the names of new workers, and the events of a step."""
        args: dict[str, Any] = {"step": step}
        for worker in timeline.workers:
            if worker not in self._named:
                self._named.add(worker)
                yield _event("thread_name", worker, {"name": f"worker {worker}", **args}, ph="M")
        for span in timeline.spans:
            begin, end = (_microseconds(at + offset_s) for at in (span.begin_s, span.end_s))
            name, dur = span.state.value, round(end - begin, 3)
            yield _event(name, span.worker, args, ph="X", ts=begin, dur=dur)
        for mark in timeline.marks:
            at = _microseconds(mark.at_s + offset_s)
            yield _event(mark.name, mark.worker, args, ph="i", s="t", ts=at)


def is_event(value: Mapping[str, Any]) -> bool:
    """Return whether an object is an event as `TraceFile` writes it."""
    phase, is_placed = value.get("ph"), is_number(value.get("ts")) and "name" in value
    is_whole = is_placed and (phase == "i" or (phase == "X" and is_number(value.get("dur"))))
    return type(value.get("tid")) is int and (phase == "M" or is_whole)


def _event(name: str, worker: int, args: Mapping[str, Any], **kind: Any) -> dict[str, Any]:
    return {"name": name, **kind, "pid": 0, "tid": worker, "args": args}


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, rounded to nanoseconds."""
    return round(1e6 * seconds, 3)
