"""What the workers did and when: spans of states, the numbers of a step, a trace for Perfetto.

    worker 0   GGGGGGGGGGGGGGGGGGG . LLLLL          G generating   s spot
    worker 1   GGGGGGGG . sssssssssss. LLL          . idle         L learning
               |      phase      |st |

A phase is a longest interval of time in which somebody generates; a step has several where held-out
problems are asked, too. Of the time in phases that a worker does not generate, what it spends in
SPOT is harvested. Time in which nobody generates and somebody is still in SPOT is stolen (st): the
step waits for it.

A trace file is an array of Chrome's trace events without its closing bracket, which the format
allows: a step is appended, nothing is written twice. Pictures are `timeline_picture`'s business.

    [
    {"name": "thread_name", "ph": "M", "pid": 0, "tid": 1, "args": {"name": "worker 1", "step": 1}},
    {"name": "spot", "ph": "X", "ts": 2e6, "dur": 5e5, "pid": 0, "tid": 1, "args": {"step": 1}},
    {"name": "drafter v3 published", "ph": "i", "s": "t", "ts": 2.2e6, "pid": 0, "tid": 1,
     "args": {"step": 1}},
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from longtail.cluster.states import State, StateInterval
from longtail.errors import CheckpointError, ConfigError

FILE = "trace.json"
_MOST = 1e18
"""Steps, workers and microseconds beyond it are damage."""
_BEGIN = b"[\n"
Interval = tuple[float, float]
"""From when to when, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A worker was in a state for a while.

    Example: Span(worker=1, state=State.SPOT, begin_s=2.0, end_s=2.5)
    """

    worker: int
    state: State
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something happened to a worker at a moment.

    Example: Mark(worker=1, at_s=2.2, name="drafter v3 published")
    """

    worker: int
    at_s: float
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step: the spans of each worker lie end to end from `begin_s` to `end_s`.

    Example: Timeline(spans=(Span(worker=0, state=State.GENERATING, begin_s=0.0, end_s=3.0),
                             Span(worker=1, state=State.GENERATING, begin_s=0.0, end_s=2.0),
                             Span(worker=1, state=State.SPOT, begin_s=2.0, end_s=3.0)),
                      marks=(Mark(worker=0, at_s=2.5, name="drafter v3 published"),),
                      begin_s=0.0, end_s=3.0)
    """

    spans: tuple[Span, ...]
    """By worker, then by time; none is empty."""
    marks: tuple[Mark, ...]
    begin_s: float
    end_s: float

    @staticmethod
    def of(interval: StateInterval, marks: Sequence[Mark] = ()) -> "Timeline":
        """Turn the changes of a states into spans."""
        spans = []
        for worker, state in enumerate(interval.states):
            changes = [change for change in interval.changes if change.worker == worker]
            states = [state, *(change.state for change in changes)]
            times = [interval.begin_s, *(change.at for change in changes), interval.end_s]
            spans += [
                Span(worker=worker, state=state, begin_s=begin, end_s=end)
                for state, begin, end in zip(states, times[:-1], times[1:], strict=True)
                if end > begin
            ]
        return Timeline(
            spans=tuple(spans), marks=tuple(marks), begin_s=interval.begin_s, end_s=interval.end_s
        )

    @property
    def workers(self) -> list[int]:
        """Workers, in rising order."""
        return sorted({span.worker for span in self.spans})

    @property
    def phases(self) -> list[Interval]:
        """Longest intervals of time in which somebody generates."""
        return _joined(self._in_state(State.GENERATING))

    def seconds(self) -> dict[int, dict[State, float]]:
        """Return the seconds that each worker spent in each state."""
        totals = {worker: dict.fromkeys(State, 0.0) for worker in self.workers}
        for span in self.spans:
            totals[span.worker][span.state] += span.seconds
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the step's numbers.

        cluster/generating_s, idle_s, spot_s, learning_s   sums over the workers
        cluster/idle_utilization   of spot and idle time in phases, what was spot; 0 of none
        cluster/spot_stop_latency_s          nobody generates, somebody is in SPOT
        cluster/spot_stop_latency_share      of the step
        """
        totals = self.seconds().values()
        named = (State.GENERATING, State.IDLE, State.SPOT, State.LEARNING)
        metrics = {
            f"cluster/{state.value}_s": sum((each[state] for each in totals), 0.0)
            for state in named
        }
        phases = self.phases
        spot, idle = (self._overlap(state, phases) for state in (State.SPOT, State.IDLE))
        generating_or_spot = _joined([*phases, *self._in_state(State.SPOT)])
        spot_stop_latency_s = max(_length(generating_or_spot) - _length(phases), 0.0)
        step_s = self.end_s - self.begin_s
        return metrics | {
            "cluster/idle_utilization": spot / (spot + idle) if spot + idle else 0.0,
            "cluster/spot_stop_latency_s": spot_stop_latency_s,
            "cluster/spot_stop_latency_share": spot_stop_latency_s / step_s if step_s else 0.0,
        }

    def _in_state(self, state: State) -> list[Interval]:
        return [(span.begin_s, span.end_s) for span in self.spans if span.state is state]

    def _overlap(self, state: State, phases: Sequence[Interval]) -> float:
        """Sum up the time of all workers in a state, as far as it lies in phases."""
        overlaps = (
            max(min(end, last) - max(begin, first), 0.0)
            for begin, end in self._in_state(state)
            for first, last in phases
        )
        return sum(overlaps, 0.0)


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Join what touches or overlaps: (0, 2), (1, 3), (3, 4), (6, 7) -> (0, 4), (6, 7)."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in intervals), 0.0)


def to_trace(timelines: Mapping[int, Timeline]) -> dict[str, Any]:
    """Return the timelines of training steps as one trace that begins at 0."""
    events: list[dict[str, Any]] = []
    named: set[int] = set()
    begin_s = min((timeline.begin_s for timeline in timelines.values()), default=0.0)
    for step, timeline in timelines.items():
        events += _names(step, timeline, named)
        events += _events(step, timeline, -begin_s)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(step: int, timeline: Timeline, named: set[int]) -> Iterator[dict[str, Any]]:
    """Name the workers that have no name yet."""
    for worker in timeline.workers:
        if worker not in named:
            named.add(worker)
            args = {"name": f"worker {worker}", "step": step}
            yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": worker, "args": args}


def _events(step: int, timeline: Timeline, shift_s: float) -> Iterator[dict[str, Any]]:
    for span in timeline.spans:
        begin, end = _microseconds(span.begin_s + shift_s), _microseconds(span.end_s + shift_s)
        yield {
            "name": span.state.value, "ph": "X", "ts": begin, "dur": round(end - begin, 3),
            "pid": 0, "tid": span.worker, "args": {"step": step},
        }  # fmt: skip
    for mark in timeline.marks:
        yield {
            "name": mark.name, "ph": "i", "s": "t", "ts": _microseconds(mark.at_s + shift_s),
            "pid": 0, "tid": mark.worker, "args": {"step": step},
        }  # fmt: skip


def _microseconds(seconds: float) -> float:
    """To the nanosecond."""
    return round(1e6 * seconds, 3)


@final
class TraceFile:
    """trace.json of a run; a step is on disk once appended.

    Clocks begin anew with each sitting, the trace goes on: the first step of a sitting begins where
    the trace ended. A killed process leaves at most one torn line, and events of steps after the
    last checkpoint. Opening for a resumed run removes both.
    """

    def __init__(self, path: Path, *, last_step: int | None = None) -> None:
        """Open for appending after `last_step`, the checkpoint's; None begins a new file."""
        self._path = path
        self._named: set[int] = set()
        self._end_s = 0.0
        self._shift_s: float | None = None
        """From this sitting's clock to the trace's."""
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
        if self._shift_s is None:
            self._shift_s = self._end_s - timeline.begin_s
        events = [
            *_names(step, timeline, self._named),
            *_events(step, timeline, self._shift_s),
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
                event = _event_of(line)
                if event and event["args"]["step"] <= last_step:
                    new.write(line)
                    self._take_note(event)
            new.flush()
            os.fsync(new.fileno())
        temporary.replace(self._path)

    def _take_note(self, event: Mapping[str, Any]) -> None:
        if event["ph"] == "M":
            self._named.add(event["tid"])
        else:
            self._end_s = max(self._end_s, (event["ts"] + event.get("dur", 0.0)) / 1e6)

    def _unwritten(self, reason: str | None) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {reason}; free some space, then start again: the run resumes from its "
            "newest checkpoint"
        )


def _event_of(line: bytes) -> dict[str, Any]:
    """Return the event of a whole line; {} for the bracket and what is torn or damaged."""
    if not line.endswith(b"},\n"):
        return {}
    try:
        event = json.loads(line[:-2])
    except (ValueError, RecursionError):
        return {}
    return event if _is_event(event) else {}


def _is_event(event: object) -> bool:
    """Tell whether JSON holds an event as they are written here."""
    if not isinstance(event, dict) or not isinstance(event.get("args"), dict):
        return False
    times = () if event.get("ph") == "M" else (event.get("ts"), event.get("dur", 0.0))
    numbers = (event["args"].get("step"), event.get("tid"), *times)
    return all(isinstance(each, int | float) and abs(each) < _MOST for each in numbers)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace; a line that is being written counts as not there.

    Raises ConfigError where there is no trace.
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
