"""A rollout as a picture: requests running, nodes drafted, accept length, and when it was drafted.

Thousands of engine steps share a few hundred columns of pixels, so they are summed up by slices of
time: the mean as a line, least and greatest as a band behind it. What is written in files is
`rollout_log`'s business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from longtail.engine.rollout_log import RolloutSeries, accept_lengths
from longtail.report.plots import blank, write
from longtail.run.metrics import Number

if TYPE_CHECKING:
    from longtail.report.plots import Axes

_SLICES = 360
"""Of the time axis, at most."""
_SMOOTH = 9
"""Slices of a running mean."""
_MANY = 60
"""Switches from which on only the shading shows them: lines would cover everything."""
_RUNNING, _NODES, _ACCEPT = "#3b6ea8", "#7a5195", "#1b7f79"
_ON, _OFF, _PLAIN = "#2e9e4f", "#d1495b", "#f0b64a"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slices:
    """Steps of a rollout, grouped by slices of time that hold one at least.

    Example: steps ending at 0.1, 0.2, 0.9 s in 3 slices: edges (0, 0.2, 0.9), first (0, 2)
    """

    edges: Float[np.ndarray, "edges"]
    first: Int[np.ndarray, "n"]

    def mean(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Of the steps of each slice."""
        sums = np.add.reduceat(np.asarray(values, dtype=np.float64), self.first)
        return sums / np.diff(self.first, append=len(values))

    def least(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Of the steps of each slice."""
        return np.minimum.reduceat(np.asarray(values, dtype=np.float64), self.first)

    def greatest(self, values: Sequence[Number]) -> Float[np.ndarray, "n"]:
        """Of the steps of each slice."""
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
    """Draw a rollout into a PNG.

    Raises ConfigError where matplotlib is not installed.
    """
    slices = _sliced(series)
    figure = blank(11.0, 7.6)
    panels = running, nodes, accept = figure.subplots(3, 1, sharex=True, height_ratios=(1, 1, 1.15))
    _columns(running, slices, slices.mean(series.running), _RUNNING)
    running.set_title("Requests still being written", **_TITLE)
    running.set_ylabel("requests")
    _band(nodes, slices, series.nodes, _NODES)
    nodes.set_title("Tokens drafted ahead, and checked, in each engine step", **_TITLE)
    nodes.set_ylabel("draft tokens a step")
    _accepted(accept, series, slices)
    _shade_plain(panels, series, slices)
    _mark_switches(panels, series)
    for panel in panels:
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0)
    running.set_ylim(0, 1.08 * max(series.running))
    nodes.set_ylim(0, 1.08 * max(*series.nodes, 1))
    accept.set_xlabel("seconds since the rollout began")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    handles, labels = running.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    write(figure, path)


_TITLE: dict[str, Any] = {"loc": "left", "fontsize": 10.5}
_BESIDE_TITLE: dict[str, Any] = {
    "loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "ncols": 2, "fontsize": 8.5,
    "frameon": False, "borderpad": 0.2,
}  # fmt: skip


def _columns(axis: "Axes", slices: _Slices, values: Float[np.ndarray, "n"], color: str) -> None:
    axis.stairs(values, slices.edges, fill=True, color=color, alpha=0.14)
    axis.stairs(values, slices.edges, color=color, linewidth=1.4, baseline=None)


def _band(axis: "Axes", slices: _Slices, values: Sequence[Number], color: str) -> None:
    """Draw the mean of each slice over its least and greatest."""
    low, high = slices.least(values), slices.greatest(values)
    if (high > low).any():
        axis.stairs(high, slices.edges, baseline=low, fill=True, color=color, alpha=0.2,
                    label="least to most")  # fmt: skip
    means = slices.mean(values)
    axis.stairs(means, slices.edges, color=color, linewidth=1.4, baseline=None, label="mean")
    axis.legend(**_BESIDE_TITLE)


def _accepted(axis: "Axes", series: RolloutSeries, slices: _Slices) -> None:
    """Draw tokens that a drafted request gets of a step: each slice, and a running mean."""
    lengths = accept_lengths(series)
    means, most = slices.mean(lengths), slices.greatest(lengths)
    middles = (slices.edges[1:] + slices.edges[:-1]) / 2
    axis.vlines(middles, slices.least(lengths), most, color=_ACCEPT, alpha=0.18, linewidth=1.2)
    axis.scatter(
        middles, means, s=9, color=_ACCEPT, alpha=0.7, linewidths=0, label="mean, least to most"
    )
    window = np.ones(min(_SMOOTH, len(means)))
    held = np.convolve(np.ones(len(means)), window, mode="same")
    smooth = np.convolve(means, window, mode="same") / held
    axis.plot(middles, smooth, color="#0b3d3a", linewidth=1.6, label="running mean")
    axis.set_title("Accept length: tokens that a draft yields in one step (plain: 1)", **_TITLE)
    axis.set_ylabel("tokens a step")
    axis.set_ylim(0.8, max(1.08 * float(most.max()), 2.2))
    axis.legend(**_BESIDE_TITLE)


def _shade_plain(panels: Sequence["Axes"], series: RolloutSeries, slices: _Slices) -> None:
    """Shade slices that are mostly plain; a lone look at drafting does not interrupt them."""
    plain = slices.mean([float(not drafts) for drafts in series.drafts]) > 0.5
    turns = np.flatnonzero(np.diff(plain.astype(np.int8), prepend=0, append=0)).tolist()
    edges = slices.edges.tolist()
    between = zip(turns[::2], turns[1::2], strict=True)
    stretches = [(edges[begin], edges[end] - edges[begin]) for begin, end in between]
    label = f"plain decoding ({plain_share(series):.0%} of the time)"
    for panel in panels if stretches else ():
        panel.broken_barh(
            stretches, (0, 1), transform=panel.get_xaxis_transform(), facecolor=_PLAIN, alpha=0.22,
            linewidth=0, zorder=0, label=label,
        )  # fmt: skip


def _mark_switches(panels: Sequence["Axes"], series: RolloutSeries) -> None:
    """Draw a line where the engine changed its mind; many of them are said, not drawn."""
    for drafts, color, label in ((True, _ON, "switched to drafting"), (False, _OFF, "to plain")):
        times = [series.begin_of(i) for i, switch in series.switches if switch.drafts is drafts]
        if not times:
            continue
        width = 1.3 if len(series.switches) <= _MANY else 0.3
        style: dict[str, Any] = {
            "color": color,
            "linewidth": width,
            "alpha": 0.9,
            "linestyle": "--",
        }
        for panel in panels:
            panel.vlines(
                times, 0, 1, transform=panel.get_xaxis_transform(), **style,
                label=f"{label} ({len(times)}x)",
            )  # fmt: skip
