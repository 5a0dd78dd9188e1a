"""Suggestions for mistyped names."""

import difflib
import os
from collections.abc import Iterable
from pathlib import Path


def meant(name: str, known: Iterable[str]) -> str:
    """Return " (is X meant?)" for the known name, or folder in the same place, nearest to `name`.

    Returns "" if none is near.

    Example: meant("smolm2", ("smollm2", "tiny-reasoner")) == " (is smollm2 meant?)"
    """
    if near := difflib.get_close_matches(name, known, 1):
        return f" (is {near[0]} meant?)"
    path = Path(name)
    near = difflib.get_close_matches(path.name, _folders(path.parent), 1, cutoff=0.75)
    return f" (is {path.parent / near[0]} meant?)" if near else ""


def _folders(path: Path) -> list[str]:
    try:
        return [each.name for each in os.scandir(path) if each.is_dir()]
    except OSError:
        return []
