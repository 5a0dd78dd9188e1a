"""The timeline of a step: the states of each worker as spans, its metrics, and its file.

    worker 0   GGGGGGGGGGGGGGGGGGG . LLLLL          G generating   s spot      a learning ahead
    worker 1   GGGGGGGG . aaaassslll . LLL          . idle         l lending   L learning
               |      phase      |st |

A phase is a maximal interval in which a worker generates; a step with an evaluation has several.
Idle utilization is the share of other work in the time that workers do not generate in phases.
Stop latency (st) is the time with a worker in SPOT and none generating: the step waits for it.

`TraceFile` appends each step to trace.json, for Perfetto: an array of Chrome's trace events without
its closing bracket, which the format allows.

    [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "worker 1", "step": 1}},
    {"name": "spot", "ph": "X", "ts": 2e6, "dur": 5e5, "pid": 0, "tid": 1, "args": {"step": 1}},
    {"name": "drafter v3 published", "ph": "i", "s": "t", "ts": 2.2e6, "pid": 0, "tid": 1,
     "args": {"step": 1}},
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from longtail.cluster.workers.states import Span, State
from longtail.errors import AGAIN, CheckpointError
from longtail.system.files import write_atomically

TRACE_FILE = "trace.json"
_BEGIN = "[\n"

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of a worker."""

    worker: int
    at_s: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of a step: each worker's spans are contiguous from `begin_s` to `end_s`."""

    spans: tuple[Span, ...]
    """Spans by worker, then by time; none is empty."""
    marks: tuple[Mark, ...]
    begin_s: float
    end_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the timeline as JSON values; it begins at 0 s.

        Example: {"end_s": 3.0, "spans": [[0, "generating", 0.0, 3.0]], "marks": [[0, 2.5, "..."]]}
        """
        spans = [
            [each.worker, each.state.value, each.begin_s - self.begin_s, each.end_s - self.begin_s]
            for each in self.spans
        ]
        marks = [[each.worker, each.at_s - self.begin_s, each.name] for each in self.marks]
        return {"end_s": self.end_s - self.begin_s, "spans": spans, "marks": marks}

    @property
    def workers(self) -> list[int]:
        """Workers in ascending order."""
        return sorted({span.worker for span in self.spans})

    def seconds(self) -> dict[int, dict[State, float]]:
        """Return the seconds that each worker spent in each state."""
        totals = {worker: dict.fromkeys(State, 0.0) for worker in self.workers}
        for span in self.spans:
            totals[span.worker][span.state] += span.seconds
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step (docs/metrics.md)."""
        totals = self.seconds().values()
        works = (State.SPOT, State.AHEAD, State.LENDING)
        named = (State.GENERATING, State.IDLE, *works, State.LEARNING)
        sums = {state: sum((each[state] for each in totals), 0.0) for state in named}
        phases = _joined(self._in_state(State.GENERATING))
        used = sum(self._overlap(state, phases) for state in works)
        idle = self._overlap(State.IDLE, phases)
        generating_or_spot = _joined([*phases, *self._in_state(State.SPOT)])
        spot_stop_latency_s = max(_length(generating_or_spot) - _length(phases), 0.0)
        step_s = self.end_s - self.begin_s
        return {f"cluster/{state.value}_s": seconds for state, seconds in sums.items()} | {
            "cluster/idle_utilization": used / (used + idle) if used + idle else 0.0,
            "cluster/spot_stop_latency_s": spot_stop_latency_s,
            "cluster/spot_stop_latency_share": spot_stop_latency_s / step_s if step_s else 0.0,
        }

    def _in_state(self, state: State) -> list[Interval]:
        return [(span.begin_s, span.end_s) for span in self.spans if span.state is state]

    def _overlap(self, state: State, phases: Sequence[Interval]) -> float:
        """Sum the seconds that all workers were in a state during phases."""
        overlaps = (
            max(min(end, last) - max(begin, first), 0.0)
            for begin, end in self._in_state(state)
            for first, last in phases
        )
        return sum(overlaps, 0.0)


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch or overlap: (0, 2), (1, 3), (3, 4), (6, 7) -> (0, 4), (6, 7)."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in intervals), 0.0)


@final
class TraceFile:
    """The trace of a run, on disk after each step; opened after `last_step`, the checkpoint's.

    The clock starts anew in each process, but the trace continues: the first step of a resumed run
    begins where the trace ended. Events of later steps, and a torn line, are removed first.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        self._path = path
        kept = [] if last_step is None or not path.exists() else _events_until(path, last_step)
        self._named = {each["tid"] for each in kept if each["ph"] == "M"}
        ends = [each["ts"] + each.get("dur", 0.0) for each in kept if each["ph"] != "M"]
        self._end_s = max(ends, default=0.0) / 1e6
        self._offset_s: float | None = None
        """Seconds from this process's clock to the trace's."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _BEGIN + "".join(map(_line, kept)))
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._unwritten(error.strerror) from error

    def append(self, step: int, timeline: Timeline) -> None:
        """Write the events of one step. Raises CheckpointError when the disk refuses."""
        if self._offset_s is None:
            self._offset_s = self._end_s - timeline.begin_s
        lines = "".join(map(_line, self._events(step, timeline, self._offset_s))).encode()
        try:
            written = self._file.write(lines)
        except OSError as error:
            raise self._unwritten(error.strerror) from error
        if written != len(lines):
            raise self._unwritten("the disk is full")

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

    def _unwritten(self, reason: str | None) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}; free some space, then {AGAIN}")


def _event(name: str, worker: int, args: Mapping[str, Any], **kind: Any) -> dict[str, Any]:
    return {"name": name, **kind, "pid": 0, "tid": worker, "args": args}


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event of a line; {} for the bracket, and for a torn or damaged line."""
    try:
        event = json.loads(line[:-2]) if line.endswith(b"},\n") else {}
        times = () if event["ph"] == "M" else (event["ts"], event.get("dur", 0.0))
        numbers = (event["args"]["step"], event["tid"], *times)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return {}
    is_event = all(isinstance(each, int | float) and abs(each) < 1e18 for each in numbers)
    return event if is_event else {}


def _events_until(path: Path, last_step: int) -> list[dict[str, Any]]:
    events = map(event_of, path.read_bytes().splitlines(keepends=True))
    return [each for each in events if each and each["args"]["step"] <= last_step]


def _line(event: Mapping[str, Any]) -> str:
    return f"{json.dumps(event)},\n"


def _microseconds(seconds: float) -> float:
    """Convert to microseconds, rounded to nanoseconds."""
    return round(1e6 * seconds, 3)
