"""Figures, and the only door to matplotlib: an extra, imported when something is drawn.

Parts of a figure are made by its own methods, so that who draws imports nothing else of it; a key
of a legend is a bar or a line without data.
"""

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
    """Return an empty figure of so many inches, which finds room for all that is put into it.

    Raises ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"the picture wants matplotlib: {pip_install('plots')}") from error
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def write(figure: "Figure", path: Path) -> None:
    """Write a PNG, its directory included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=_DOTS_PER_INCH)
