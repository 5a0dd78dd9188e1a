"""Values from log lines that may be damaged."""

import json
import math
from typing import Any

LARGEST = 1e150
"""Largest number taken for valid: sums of larger ones are not finite."""
_DIGITS = 7


def row_of(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line; {} for a torn or damaged line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}


def number(value: object) -> float | None:
    """Return a finite number as a float; None for any other value.

    Example: number(3) == 3.0, number("3") is None, number(True) is None
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -LARGEST < value < LARGEST else None


def numbers(value: object) -> list[float]:
    """Return the numbers of a list; [] if it is no list or holds anything else."""
    found = [number(each) for each in value] if isinstance(value, list) else []
    whole = [each for each in found if each is not None]
    return whole if len(whole) == len(found) else []


def count(value: object) -> int:
    """Return a whole number, at least 0; 0 for any other value."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**53 else 0


def text(value: object, most: int) -> str:
    """Return at most `most` characters of a text, encodable as UTF-8; empty for another value."""
    shown = value[:most] if isinstance(value, str) else ""
    return shown.encode(errors="replace").decode()


def short(value: float | None) -> float | int | None:
    """Return a number with 7 significant digits, whole numbers as integers; None for NaN."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def shorts(values: list[float]) -> list[float | int | None]:
    """Return numbers with 7 significant digits."""
    return [short(value) for value in values]
