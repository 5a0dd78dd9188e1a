"""Plot of a rollout: running requests, drafted nodes, accept length, and plain decoding.

A rollout has thousands of engine steps, so the plot aggregates them in slices of time: a line for
the mean, a band for minimum and maximum. `engine.rollout_log` describes the data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int

from longtail.engine.rollout_log import RolloutSeries, accept_lengths
from longtail.report.plots import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    TEAL,
    TITLE,
    blank,
    frame,
    write,
)
from longtail.run.metrics import Number

if TYPE_CHECKING:
    from longtail.report.plots import Axes

_SLICES = 360
"""Largest number of slices of the time axis."""
_SMOOTH = 9
"""Number of slices in a moving average."""
_MANY = 60
"""Number of switches beyond which their lines are thin, because they would cover the plot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slices:
    """Engine steps of a rollout grouped by slices of time; empty slices are left out.

    Example: steps ending at 0.1, 0.2, 0.9 s in 3 slices: edges (0, 0.2, 0.9), first (0, 2)
    """

    edges: Float[np.ndarray, "edges"]
    first: Int[np.ndarray, "n"]

    def mean(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Return the mean of each slice, given one value per step."""
        sums = np.add.reduceat(np.asarray(values, dtype=np.float64), self.first)
        return sums / np.diff(self.first, append=len(values))

    def least(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Return the minimum of each slice."""
        return np.minimum.reduceat(np.asarray(values, dtype=np.float64), self.first)

    def greatest(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Return the maximum of each slice."""
        return np.maximum.reduceat(np.asarray(values, dtype=np.float64), self.first)


def _sliced(series: RolloutSeries) -> _Slices:
    ends = np.asarray(series.seconds)
    begins = np.concatenate([[0.0], ends[:-1]])
    places = np.minimum(_SLICES * begins / max(ends[-1], 1e-9), _SLICES - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(places, prepend=-1))
    return _Slices(edges=np.append(begins[first], ends[-1]), first=first)


def plain_share(series: RolloutSeries) -> float:
    """Return the share of the rollout's time in steps that verified no draft."""
    begins = (0.0, *series.seconds[:-1])
    steps = zip(begins, series.seconds, series.drafts, strict=True)
    plain = sum(end - begin for begin, end, drafts in steps if not drafts)
    return plain / series.seconds[-1] if series.seconds[-1] else 0.0


def draw(series: RolloutSeries, path: Path, *, title: str = "One rollout") -> None:
    """Draw a rollout as PNG or SVG. Raises ConfigError if matplotlib is not installed."""
    slices = _sliced(series)
    figure = blank(11.0, 7.2)
    panels = running, nodes, accept = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.15))
    means = slices.mean(series.running)
    running.stairs(means, slices.edges, fill=True, color=BLUE, alpha=0.2)
    running.stairs(means, slices.edges, color=BLUE, linewidth=1.6, baseline=None)
    running.set_title("Running requests", color=BLUE, fontweight="bold", **TITLE)
    running.set_ylabel("requests")
    _band(nodes, slices, series.nodes)
    _accepted(accept, series, slices)
    for panel in panels:
        frame(panel)
        panel.margins(x=0)
    running.set_ylim(0, 1.12 * max(series.running))
    nodes.set_ylim(0, 1.12 * max(*series.nodes, 1))
    _shade_plain(panels, series, slices)
    _mark_switches(panels, series)
    accept.set_xlabel("seconds since the rollout began")
    figure.suptitle(title, fontsize=12.5, fontweight="bold", x=0.01, ha="left", parse_math=False)
    write(figure, path)


def _band(axis: "Axes", slices: _Slices, values: Sequence[Number]) -> None:
    """Draw the mean of each slice over the band from its minimum to its maximum."""
    low, high = slices.least(values), slices.greatest(values)
    if (high > low).any():
        axis.stairs(high, slices.edges, baseline=low, fill=True, color=PURPLE, alpha=0.28)
    means = slices.mean(values)
    axis.stairs(means, slices.edges, color=PURPLE, linewidth=1.6, baseline=None)
    title = "Draft tokens verified in each engine step: mean, and minimum to maximum"
    axis.set_title(title, color=PURPLE, fontweight="bold", **TITLE)
    axis.set_ylabel("tokens per step")


def _accepted(axis: "Axes", series: RolloutSeries, slices: _Slices) -> None:
    """Draw the accept length: mean and range of each slice, and a moving average."""
    lengths = accept_lengths(series)
    means, most = slices.mean(lengths), slices.greatest(lengths)
    middles = (slices.edges[1:] + slices.edges[:-1]) / 2
    axis.vlines(middles, slices.least(lengths), most, color=TEAL, alpha=0.25, linewidth=1.2)
    axis.scatter(middles, means, s=9, color=TEAL, alpha=0.6, linewidths=0)
    window = np.ones(min(_SMOOTH, len(means)))
    held = np.convolve(np.ones(len(means)), window, mode="same")
    smooth = np.convolve(means, window, mode="same") / held
    axis.plot(middles, smooth, color=TEAL, linewidth=2.2)
    title = "Accept length: tokens per drafted request and step, with its moving average"
    axis.set_title(title, color=TEAL, fontweight="bold", **TITLE)
    axis.set_ylabel("tokens per step")
    axis.set_ylim(0.8, max(1.08 * float(most.max()), 2.2))
    axis.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
    axis.annotate(
        "plain decoding: 1", (1, 1), xycoords=("axes fraction", "data"), xytext=(-3, 2),
        textcoords="offset points", ha="right", va="bottom", fontsize=8,
    )  # fmt: skip


def _shade_plain(panels: Sequence["Axes"], series: RolloutSeries, slices: _Slices) -> None:
    """Shade the slices in which most steps decoded plainly, and name the first."""
    plain = slices.mean([float(not drafts) for drafts in series.drafts]) > 0.5
    turns = np.flatnonzero(np.diff(plain.astype(np.int8), prepend=0, append=0)).tolist()
    edges = slices.edges.tolist()
    between = zip(turns[::2], turns[1::2], strict=True)
    spans = [(edges[begin], edges[end] - edges[begin]) for begin, end in between]
    if not spans:
        return
    for panel in panels:
        panel.broken_barh(
            spans, (0, 1), transform=panel.get_xaxis_transform(), facecolor=ORANGE, alpha=0.25,
            linewidth=0, zorder=0,
        )  # fmt: skip
    panels[1].annotate(
        f"shaded: plain decoding, {plain_share(series):.0%} of the time", (0.995, 0.9),
        xycoords="axes fraction", ha="right", color=ORANGE, fontsize=9, fontweight="bold",
    )  # fmt: skip


def _mark_switches(panels: Sequence["Axes"], series: RolloutSeries) -> None:
    """Draw a vertical line at each switch between drafting and plain decoding, and count them."""
    place = 0.9
    for drafts, color, label in ((True, GREEN, "to drafting"), (False, RED, "to plain decoding")):
        times = [series.begin_of(i) for i, switch in series.switches if switch.drafts is drafts]
        if not times:
            continue
        width = 1.3 if len(series.switches) <= _MANY else 0.3
        for panel in panels:
            panel.vlines(
                times, 0, 1, transform=panel.get_xaxis_transform(), color=color, linewidth=width,
                alpha=0.9, linestyle="--",
            )  # fmt: skip
        panels[0].annotate(
            f"dashed: switched {label}, {len(times)}x", (0.995, place), xycoords="axes fraction",
            ha="right", color=color, fontsize=9, fontweight="bold",
        )  # fmt: skip
        place -= 0.14
