"""The states of the workers in one step, from trace.json, as JSON values for a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail.cluster.timeline import TRACE_FILE, event_of
from longtail.view.lines import lines_of, step_of_event
from longtail.view.values import short, text

MOST_SPANS = 4000
"""Largest number of spans of all workers; beyond it, short neighbours are joined."""
_MOST_MARKS, _MOST_NAME = 500, 200

_Span = tuple[int, str, float, float]
"""Worker, state, and the seconds of begin and end."""


def read_timeline(
    directory: Path, step: int, window: tuple[float, float] | None = None
) -> dict[str, Any] | None:
    """Return the workers' states in a step; None if the trace has no such step.

    `window` limits the spans to some seconds, for finer spans where there are too many. Seconds
    count from the first span, which in a step with an evaluation or a start is before the step.
    """
    events = [event_of(line) for line in lines_of(directory / TRACE_FILE, step, step_of_event)]
    spans = [
        (int(each["tid"]), text(each.get("name"), _MOST_NAME), each["ts"], each["ts"] + each["dur"])
        for each in events
        if each.get("ph") == "X" and "dur" in each
    ]
    if not spans:
        return None
    begin = min(span[2] for span in spans)
    seconds = [(w, state, (b - begin) / 1e6, (e - begin) / 1e6) for w, state, b, e in spans]
    end_s = max(span[3] for span in seconds)
    shown = seconds if window is None else _inside(seconds, *window)
    marks = [
        [int(each["tid"]), short((each["ts"] - begin) / 1e6), text(each.get("name"), _MOST_NAME)]
        for each in events
        if each.get("ph") == "i"
    ]
    joined = _joined(shown, (window or (0.0, end_s)))
    return {
        "workers": sorted({span[0] for span in spans}),
        "end_s": short(end_s),
        "spans": [[w, state, short(b), short(e)] for w, state, b, e in joined],
        "num_spans": len(spans),
        "is_joined": len(joined) < len(shown),
        "marks": marks[:_MOST_MARKS],
        "num_marks": len(marks),
    }


def _inside(spans: Sequence[_Span], begin: float, end: float) -> list[_Span]:
    return [span for span in spans if span[3] >= begin and span[2] <= end]


def _joined(spans: Sequence[_Span], window: tuple[float, float]) -> list[_Span]:
    """Join spans shorter than a slice of time; the state with most seconds in it stands for all."""
    workers = {span[0] for span in spans}
    if len(spans) <= MOST_SPANS or not workers:
        return list(spans)
    slice_s = max((window[1] - window[0]) * 2 * len(workers) / MOST_SPANS, 1e-9)
    joined: list[_Span] = []
    groups: dict[tuple[int, int], list[_Span]] = {}
    for span in spans:
        if span[3] - span[2] >= slice_s:
            joined.append(span)
        else:
            groups.setdefault((span[0], int(span[2] / slice_s)), []).append(span)
    for (worker, _), group in groups.items():
        totals: dict[str, float] = {}
        for _, state, begin, end in group:
            totals[state] = totals.get(state, 0.0) + end - begin
        state = max(totals, key=lambda name: totals[name])
        joined.append((worker, state, min(s[2] for s in group), max(s[3] for s in group)))
    return sorted(joined, key=lambda span: (span[0], span[2]))
