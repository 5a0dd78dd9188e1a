"""The record of what an environment answers."""

from collections.abc import Mapping
from dataclasses import dataclass


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
