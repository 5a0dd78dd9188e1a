"""The record of what an environment answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("user", "tool", "system")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of an environment to a text, or the beginning of an episode."""

    messages: tuple[Mapping[str, str], ...] = ()
    """Messages that the model reads next: `role`, which is user, tool or system, and `content`."""
    reward: float = 0.0
    done: bool = False
    calls: int = 0
    """Calls of tools in the text that is answered."""
    bad_calls: int = 0
    """Calls that did not parse, named no tool, or raised."""


def is_message(value: Any) -> bool:
    """Return whether a value is a message that a model may read, with any content."""
    return isinstance(value, Mapping) and value.get("role") in ROLES and "content" in value
