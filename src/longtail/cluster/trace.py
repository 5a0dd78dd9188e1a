"""The trace of a run: timelines of its steps in a file for Perfetto.

The file is an array of Chrome's trace events without its closing bracket, which the format allows,
so each step is appended.

    [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "worker 1", "step": 1}},
    {"name": "spot", "ph": "X", "ts": 2e6, "dur": 5e5, "pid": 0, "tid": 1, "args": {"step": 1}},
    {"name": "drafter v3 published", "ph": "i", "s": "t", "ts": 2.2e6, "pid": 0, "tid": 1,
     "args": {"step": 1}},
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from longtail.cluster.timeline import Timeline
from longtail.errors import CheckpointError, ConfigError

FILE = "trace.json"
_LARGEST = 1e18
"""Largest valid step, worker or number of microseconds."""
_BEGIN = b"[\n"


def _names(step: int, timeline: Timeline, named: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the name of each worker that has none yet."""
    for worker in timeline.workers:
        if worker not in named:
            named.add(worker)
            args = {"name": f"worker {worker}", "step": step}
            yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": worker, "args": args}


def _events(step: int, timeline: Timeline, offset_s: float) -> Iterator[dict[str, Any]]:
    for span in timeline.spans:
        begin, end = _microseconds(span.begin_s + offset_s), _microseconds(span.end_s + offset_s)
        yield {
            "name": span.state.value, "ph": "X", "ts": begin, "dur": round(end - begin, 3),
            "pid": 0, "tid": span.worker, "args": {"step": step},
        }  # fmt: skip
    for mark in timeline.marks:
        yield {
            "name": mark.name, "ph": "i", "s": "t", "ts": _microseconds(mark.at_s + offset_s),
            "pid": 0, "tid": mark.worker, "args": {"step": step},
        }  # fmt: skip


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, rounded to nanoseconds."""
    return round(1e6 * seconds, 3)


@final
class TraceFile:
    """The trace of a run, on disk after each step.

    The clock starts anew in each process, but the trace continues: the first step of a resumed run
    begins where the trace ended. A killed process leaves at most one torn line, and events of steps
    after its last checkpoint. Opening the file for a resumed run removes both.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        """Open to append after `last_step`, the checkpoint's; None begins a new file."""
        self._path = path
        self._named: set[int] = set()
        self._end_s = 0.0
        self._offset_s: float | None = None
        """Seconds from this process's clock to the trace's."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if last_step is None or not path.exists():
                path.write_bytes(_BEGIN)
            else:
                self._cut_back(last_step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritten(error.strerror) from error

    def append(self, step: int, timeline: Timeline) -> None:
        """Write the events of one step. Raises CheckpointError when the disk refuses."""
        if self._offset_s is None:
            self._offset_s = self._end_s - timeline.begin_s
        events = [
            *_names(step, timeline, self._named),
            *_events(step, timeline, self._offset_s),
        ]
        lines = "".join(f"{json.dumps(event)},\n" for event in events).encode()
        try:
            written = self._file.write(lines)
        except OSError as error:
            raise self._unwritten(error.strerror) from error
        if written != len(lines):
            raise self._unwritten("the disk is full")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _cut_back(self, last_step: int) -> None:
        """Keep events up to and including `last_step`; the file is replaced in one rename."""
        temporary = self._path.with_name(f".new-{self._path.name}")
        with self._path.open("rb") as old, temporary.open("wb") as new:
            new.write(_BEGIN)
            for line in old:
                event = event_of(line)
                if event and event["args"]["step"] <= last_step:
                    new.write(line)
                    self._record(event)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(self._path)

    def _record(self, event: Mapping[str, Any]) -> None:
        if event["ph"] == "M":
            self._named.add(event["tid"])
        else:
            self._end_s = max(self._end_s, (event["ts"] + event.get("dur", 0.0)) / 1e6)

    def _unwritten(self, reason: str | None) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {reason}; free some space, then start again: the run resumes from its "
            "newest checkpoint"
        )


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event of a line; {} for the bracket, and for a torn or damaged line."""
    if not line.endswith(b"},\n"):
        return {}
    try:
        event = json.loads(line[:-2])
    except (ValueError, RecursionError):
        return {}
    return event if _is_event(event) else {}


def _is_event(event: object) -> bool:
    """Return whether JSON holds an event as `TraceFile` writes it."""
    if not isinstance(event, dict) or not isinstance(event.get("args"), dict):
        return False
    times = () if event.get("ph") == "M" else (event.get("ts"), event.get("dur", 0.0))
    numbers = (event["args"].get("step"), event.get("tid"), *times)
    return all(isinstance(each, int | float) and abs(each) < _LARGEST for each in numbers)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, without a line that is still being written.

    Raises ConfigError if there is no trace.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the {FILE} of a run") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: it is not UTF-8 text; give the {FILE} of a run") from error
    whole = text[: text.rfind("\n") + 1].rstrip().rstrip(",")
    try:
        events = json.loads(whole if whole.endswith("]") else whole + "]")
        if not isinstance(events, list) or not all(map(_is_event, events)):
            raise ValueError("it holds other things than events")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: it is no trace ({error}); give the {FILE} of a run") from error
    return events
