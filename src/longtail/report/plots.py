"""Figures of matplotlib, which is an optional dependency, imported when a figure is made."""

from pathlib import Path
from typing import TYPE_CHECKING

from longtail.errors import ConfigError
from longtail.system.machine import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Axes", "blank", "write"]

_DOTS_PER_INCH = 120


def blank(width: float, height: float) -> "Figure":
    """Return an empty figure of a width and height in inches, with automatic layout.

    Raises ConfigError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {pip_install('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def write(figure: "Figure", path: Path) -> None:
    """Write a figure as PNG, and create its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
