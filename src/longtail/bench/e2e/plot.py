"""A plot of accept length by training step, a line for each arm."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from longtail.report.plots import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    RED,
    blank,
    frame,
    label_lines,
    write,
)

_LOOKS = {
    "history": (GREY, "history"),
    "frozen": (BLUE, "trained before, frozen"),
    "serial": (PURPLE, "trained after rollouts"),
    "spot": (ORANGE, "trained by idle workers"),
    "cold": (RED, "fresh, trained by idle workers"),
    "unplaced": (GREEN, "unplaced"),
}


def draw_curves(
    by_arm: Mapping[str, Sequence[float]], path: Path, *, switch_step: int | None = None
) -> None:
    """Write a PNG or SVG; ConfigError where matplotlib is not installed."""
    figure = blank(11.0, 3.9)
    panel = figure.subplots()
    ends = []
    for arm, (color, name) in _LOOKS.items():
        if lengths := by_arm.get(arm):
            steps = range(1, len(lengths) + 1)
            panel.plot(steps, lengths, color=color, linewidth=2, marker="o", markersize=3.5)
            ends.append((name, color, float(len(lengths)), lengths[-1]))
    panel.set_xlabel("training step")
    panel.set_title("accept length: tokens per verify step", loc="left", fontsize=10.5)
    panel.locator_params(axis="x", integer=True)
    panel.set_ylim(bottom=1.0)
    panel.margins(x=0.02)
    frame(panel)
    if switch_step is not None:
        panel.axvline(switch_step - 0.5, color=INK, linestyle=":")
        panel.annotate(
            "another task", (switch_step - 0.5, 1), xycoords=("data", "axes fraction"),
            xytext=(4, -10), textcoords="offset points", fontsize=9,
        )  # fmt: skip
    label_lines(panel, ends)
    write(figure, path)
