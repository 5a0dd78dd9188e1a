"""Figures of matplotlib, which is an optional dependency, imported when a figure is made.

All figures have one style: no background, text in a tone that is readable on white and on black,
names beside what they name instead of legends, and one palette.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from longtail.errors import ConfigError
from longtail.system.machine import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Axes", "Figure", "blank", "frame", "label_lines", "write"]

INK = "#727d89"
"""Text and axes: a contrast of about 4 to 1 on white and on GitHub's black."""
BLUE, ORANGE, PURPLE, TEAL = "#3f7fc1", "#dd8a1c", "#8c66c2", "#1c9a88"
RED, GREEN, GREY, PINK = "#d2505c", "#4a9d4f", "#8b949e", "#c9609f"
PALETTE = (BLUE, ORANGE, TEAL, PURPLE, RED, GREEN, PINK, GREY)
TITLE: Mapping[str, Any] = {"loc": "left", "fontsize": 10.5}
_DOTS_PER_INCH = 160
_APART = 0.062
"""Least distance of two names at the right edge, as a share of the panel's height."""


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of a width and height in inches, with automatic layout.

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {pip_install('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="none")


def frame(panel: "Axes", *, grid: Literal["x", "y"] = "y") -> None:
    """Leave only the left and the lower axis, and a faint grid."""
    panel.grid(axis=grid, color=GREY, alpha=0.3, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def label_lines(panel: "Axes", lines: Sequence[tuple[str, str, float, float]]) -> None:
    """Write the name of each line (name, colour, x, y) beside its last point.

    Names that would touch each other are moved apart upwards.
    """
    low, high = panel.get_ylim()
    least = _APART * (high - low)
    at = low - least
    for name, color, x, y in sorted(lines, key=lambda line: line[3]):
        at = max(y, at + least)
        panel.annotate(
            name, (x, at), xytext=(7, 0), textcoords="offset points", va="center", color=color,
            fontsize=9.5, fontweight="bold", annotation_clip=False, parse_math=False,
        )  # fmt: skip


def write(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG or SVG, by the ending of its path, and create its directory.

    The same figure makes the same file.
    """
    from matplotlib import rc_context
    from matplotlib.text import Text

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
