"""Plot of training steps: one bar per worker over time, coloured by the worker's state.

Steps to compare are panels above each other that share a time axis; each step begins at 0.
`cluster.timeline` describes the data.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtail.cluster.states import State
from longtail.cluster.timeline import Timeline
from longtail.report.plots import blank, write

if TYPE_CHECKING:
    from longtail.report.plots import Axes

_LOOKS = {
    State.GENERATING: ("#3b6ea8", "generates completions"),
    State.IDLE: ("#e4e7eb", "idle"),
    State.SPOT: ("#f0a830", "trains the drafter (spot)"),
    State.LEARNING: ("#7a5195", "trains the policy"),
    State.STARTING: ("#b9d8c2", "starts"),
    State.DEAD: ("#d1495b", "lost"),
}
_BAR = 0.78
"""Height of a bar, as a share of its row."""
_ROW, _LEAST, _MOST = 0.34, 1.3, 5.0
"""Height of a worker's row and of a panel (least, most), in inches."""
_NUMBERED = 9
"""Largest number of mark names that the legend lists."""
_INK = "#1c2530"
_END: dict[str, Any] = {"color": _INK, "linewidth": 1.2, "linestyle": ":"}
_EVENT: dict[str, Any] = {"color": _INK, "marker": "v", "markersize": 5}


def draw(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draw labelled steps into a PNG. Raises ConfigError if matplotlib is not installed."""
    heights = [min(max(_ROW * len(timeline.workers), _LEAST), _MOST) for _, timeline in timelines]
    figure = blank(11.0, 1.5 + sum(heights) + 0.55 * len(heights))
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    panels = grid[:, 0]
    longest_s = max(timeline.end_s - timeline.begin_s for _, timeline in timelines)
    names = list(dict.fromkeys(mark.name for _, timeline in timelines for mark in timeline.marks))
    numbers = {name: number for number, name in enumerate(names, start=1)}
    for panel, (label, timeline) in zip(panels, timelines, strict=True):
        _bars(panel, timeline)
        _marks(panel, timeline, numbers if len(numbers) <= _NUMBERED else {})
        _frame(panel, timeline)
        title = _title(label, timeline, timelines[0])
        panel.set_title(title, loc="left", fontsize=10.5, parse_math=False)
    panels[0].set_xlim(0, 1.02 * longest_s or 1.0)
    panels[-1].set_xlabel("seconds since the step began")
    figure.suptitle(
        "State of each worker in a training step", fontsize=13, fontweight="bold", x=0.01,
        ha="left",
    )  # fmt: skip
    found = {span.state for _, timeline in timelines for span in timeline.spans}
    looks = [look for state, look in _LOOKS.items() if state in found]
    key = panels[0]
    handles = [key.broken_barh([], (0, 0), color=color, label=label) for color, label in looks]
    handles += key.plot([], [], label="end of the step", **_END)
    events = [f"{number}: {name}" for name, number in numbers.items()]
    for event in events if len(events) <= _NUMBERED else [f"{len(events)} kinds of events"]:
        handles += key.plot([], [], linestyle="", label=event, **_EVENT)
    legend = figure.legend(
        handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    write(figure, path)


def _title(label: str, timeline: Timeline, reference: tuple[str, Timeline]) -> str:
    """Return a panel's title: seconds, speed relative to the first step, shares of states."""
    step_s = timeline.end_s - timeline.begin_s
    seconds = timeline.seconds().values()
    whole = sum(sum(each.values()) for each in seconds)
    shares = {state: sum(each[state] for each in seconds) / (whole or 1.0) for state in State}
    name, first = reference
    first_s = first.end_s - first.begin_s
    compared = step_s and timeline is not first
    times = f" ({first_s / step_s:.2f}x as fast as {name})" if compared else ""
    spot = f", {shares[State.SPOT]:.0%} spot" if shares[State.SPOT] else ""
    return f"{label}: {step_s:.2f} s{times}; workers' time: {shares[State.IDLE]:.0%} idle{spot}"


def _bars(panel: "Axes", timeline: Timeline) -> None:
    for row, worker in enumerate(timeline.workers):
        for state, (color, _) in _LOOKS.items():
            spans = [
                (span.begin_s - timeline.begin_s, span.seconds)
                for span in timeline.spans
                if span.worker == worker and span.state is state
            ]
            panel.broken_barh(spans, (row - _BAR / 2, _BAR), facecolor=color, linewidth=0)


def _marks(panel: "Axes", timeline: Timeline, numbers: Mapping[str, int]) -> None:
    """Draw marks as ticks on the worker's bar; the first mark of a name gets its number."""
    rows = {worker: row for row, worker in enumerate(timeline.workers)}
    named: set[str] = set()
    for mark in sorted(timeline.marks, key=lambda mark: mark.at_s):
        at, top = mark.at_s - timeline.begin_s, rows[mark.worker] - _BAR / 2
        panel.vlines(at, top, top + _BAR, color=_INK, linewidth=1.2)
        panel.plot([at], [top], clip_on=False, **_EVENT)
        if mark.name in numbers and mark.name not in named:
            named.add(mark.name)
            panel.annotate(
                str(numbers[mark.name]), (at, top + _BAR / 2), xytext=(5, 0),
                textcoords="offset points", va="center", fontsize=8, color=_INK,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "linewidth": 0},
            )  # fmt: skip


def _frame(panel: "Axes", timeline: Timeline) -> None:
    """Label the rows, worker 0 on top, and draw the end of the step."""
    workers = timeline.workers

    def name(row: float, _: object) -> str:
        inside = row == int(row) and 0 <= row < len(workers)
        return f"worker {workers[int(row)]}" if inside else ""

    panel.set_ylim(len(workers) - 0.4, -0.6)
    panel.locator_params(axis="y", nbins=12, integer=True)
    panel.yaxis.set_major_formatter(name)
    panel.tick_params(axis="y", length=0)
    panel.axvline(timeline.end_s - timeline.begin_s, **_END)
    panel.spines[["top", "right", "left"]].set_visible(False)
