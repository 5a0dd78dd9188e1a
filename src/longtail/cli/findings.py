"""Findings of `longtail doctor`."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "optional", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Example: Finding(part="extra", name="math", level="optional", value="absent",
                     remedy="pip install 'longtail[math]'")
    """

    part: str
    name: str
    level: Level
    value: str
    remedy: str = ""


def fact_of(part: str, name: str, value: str, remedy: str = "") -> Finding:
    """Return a finding that is never missing; with a remedy it is optional."""
    level: Level = "optional" if remedy else "ok"
    return Finding(part=part, name=name, level=level, value=value, remedy=remedy)
