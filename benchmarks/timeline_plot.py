"""Plot of training steps: one bar per worker over time, coloured by the worker's state.

Steps to compare are panels above each other that share a time axis; each step begins at 0. A state
is named on its longest bar that has room. `cluster.workers.states` describes the data. Figures have
no background, and text in a tone that is readable on white and on black.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from longtail.cluster.workers.states import State, Timeline

INK = "#727d89"
"""Text and axes: a contrast of about 4 to 1 on white and on GitHub's black."""
BLUE, ORANGE, PURPLE = "#3f7fc1", "#dd8a1c", "#8c66c2"
RED, GREEN, GREY, PINK, PALE = "#d2505c", "#4a9d4f", "#8b949e", "#b04f9d", "#cfd6dc"
TITLE: Mapping[str, Any] = {"loc": "left", "fontsize": 10.5}
_DOTS_PER_INCH = 160
_LOOKS = {
    State.GENERATING: (BLUE, "generates"),
    State.IDLE: (GREY, "idle"),
    State.SPOT: (ORANGE, "trains the drafter"),
    State.AHEAD: (PINK, "learns ahead"),
    State.LEARNING: (PURPLE, "learns"),
    State.STARTING: (GREEN, "starts"),
    State.ABSENT: (PALE, "has no host"),
    State.DEAD: (RED, "lost"),
}
_FAINT = 0.3
"""Opacity of the bars of idle workers."""
_WIDTH = 11.0
_BAR = 0.78
"""Height of a bar, as a share of its row."""
_ROW, _LEAST, _MOST = 0.42, 1.0, 5.0
"""Height of a worker's row and of a panel (least, most), in inches."""
_LETTER = 0.095
"""Width of a letter of a name, in inches; names are left out where they do not fit."""
_LEGIBLE = 0.19
"""Least height of a row with a name, in inches."""


def draw(timelines: Sequence[tuple[str, Timeline]], path: Path) -> None:
    """Draw labelled steps as PNG or SVG."""
    heights = [min(max(_ROW * len(timeline.workers), _LEAST), _MOST) for _, timeline in timelines]
    figure = blank(_WIDTH, 0.8 + sum(heights) + 0.42 * len(heights))
    grid = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)
    longest_s = max(timeline.end_s - timeline.begin_s for _, timeline in timelines) or 1.0
    named: set[State] = set()
    for panel, height, (label, timeline) in zip(grid[:, 0], heights, timelines, strict=True):
        per_second = 0.88 * _WIDTH / longest_s
        legible = height / max(len(timeline.workers), 1) > _LEGIBLE
        _bars(panel, timeline)
        if legible:
            named |= _name_states(panel, timeline, per_second)
        _frame(panel, timeline)
        title = _title(label, timeline, timelines[0][1])
        panel.set_title(title, parse_math=False, fontweight="bold", **TITLE)
    grid[0, 0].set_xlim(0, 1.01 * longest_s)
    grid[-1, 0].set_xlabel("seconds since the step began")
    found = {span.state for _, timeline in timelines for span in timeline.spans}
    _name_others(figure, [_LOOKS[state] for state in _LOOKS if state in found - named])
    write(figure, path)


def _title(label: str, timeline: Timeline, first: Timeline) -> str:
    """Return a panel's title: seconds, speed relative to the first step, shares of states."""
    step_s = timeline.end_s - timeline.begin_s
    seconds = timeline.seconds().values()
    whole = sum(sum(each.values()) for each in seconds)
    shares = {state: sum(each[state] for each in seconds) / (whole or 1.0) for state in State}
    first_s = first.end_s - first.begin_s
    compared = step_s and timeline is not first
    times = f", {first_s / step_s:.2f}x as fast" if compared else ""
    spot = f", {shares[State.SPOT]:.0%} training the drafter" if shares[State.SPOT] else ""
    idle = f"{shares[State.IDLE]:.0%} of the workers' time idle{spot}"
    return f"{label}: {step_s:.2f} s{times}; {idle}"


def _bars(panel: Axes, timeline: Timeline) -> None:
    for row, worker in enumerate(timeline.workers):
        for state, (color, _) in _LOOKS.items():
            spans = [
                (span.begin_s - timeline.begin_s, span.seconds)
                for span in timeline.spans
                if span.worker == worker and span.state is state
            ]
            opacity = _FAINT if state is State.IDLE else 1.0
            panel.broken_barh(
                spans, (row - _BAR / 2, _BAR), facecolor=color, alpha=opacity, linewidth=0
            )


def _name_states(panel: Axes, timeline: Timeline, per_second: float) -> set[State]:
    """Write each state's name on its longest bar with room; return those that have one.

    `per_second` is the length of a second, in inches.
    """
    rows = {worker: row for row, worker in enumerate(timeline.workers)}
    named = set()
    for state, (_, name) in _LOOKS.items():
        least_s = _LETTER * len(name) / per_second
        wide = [each for each in timeline.spans if each.state is state and each.seconds >= least_s]
        if not wide:
            continue
        span = max(wide, key=lambda each: each.seconds)
        middle = (span.begin_s + span.end_s) / 2 - timeline.begin_s
        panel.text(
            middle, rows[span.worker], name, ha="center", va="center", fontsize=9.5,
            color=INK if state is State.IDLE else "white", fontweight="bold",
        )  # fmt: skip
        named.add(state)
    return named


def _name_others(figure: Figure, looks: Sequence[tuple[str, str]]) -> None:
    """List the states that have no bar with room for their names."""
    if not looks:
        return
    panel = figure.axes[0]
    handles = [panel.broken_barh([], (0, 0), color=color, label=name) for color, name in looks]
    figure.legend(handles=handles, loc="outside lower left", ncols=6, frameon=False, fontsize=9)


def _frame(panel: Axes, timeline: Timeline) -> None:
    """Label the rows, worker 0 on top, and draw the end of the step."""
    workers = timeline.workers

    def name(row: float, _: object) -> str:
        inside = row == int(row) and 0 <= row < len(workers)
        return f"worker {workers[int(row)]}" if inside else ""

    panel.set_ylim(len(workers) - 0.4, -0.6)
    panel.locator_params(axis="y", nbins=12, integer=True)
    panel.yaxis.set_major_formatter(name)
    panel.tick_params(axis="y", length=0)
    panel.axvline(timeline.end_s - timeline.begin_s, color=INK, linewidth=1.2, linestyle=":")
    panel.spines[["top", "right", "left"]].set_visible(False)


def blank(width: float, height: float) -> Figure:
    """Return an empty figure of a width and height in inches, with automatic layout."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="none")


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending of its path, and create its directory.

    The same figure makes the same file.
    """
    for panel in figure.axes:
        panel.set_facecolor("none")
        panel.tick_params(color=INK, labelcolor=INK)
        for spine in panel.spines.values():
            spine.set_edgecolor(INK)
    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    with rc_context({"svg.hashsalt": "longtail"}):
        figure.savefig(path, dpi=_DOTS_PER_INCH, metadata=metadata)
