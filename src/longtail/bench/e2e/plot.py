"""A plot of accept length by training step, a line for each arm."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from longtail.report.plots import blank, write

_COLORS = {
    "history": "#8a94a0",
    "frozen": "#3b6ea8",
    "serial": "#7a5195",
    "spot": "#f0a830",
    "cold": "#d1495b",
    "unplaced": "#6a994e",
}


def draw_curves(
    by_arm: Mapping[str, Sequence[float]], path: Path, *, switch_step: int | None = None
) -> None:
    """Write a PNG; ConfigError where matplotlib is not installed."""
    figure = blank(9.0, 4.0)
    axes = figure.subplots()
    for name, color in _COLORS.items():
        if name in by_arm:
            steps = range(1, len(by_arm[name]) + 1)
            axes.plot(steps, by_arm[name], label=name, color=color, marker="o", markersize=3)
    if switch_step is not None:
        axes.axvline(switch_step - 0.5, color="#1c2530", linestyle=":", label="another task")
    axes.set_xlabel("training step")
    axes.set_ylabel("accept length")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=1.0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=7, loc="upper left", bbox_to_anchor=(0, 1.12))
    write(figure, path)
