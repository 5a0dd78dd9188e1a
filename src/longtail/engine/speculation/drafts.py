"""Drafts within a step: which of their nodes are accepted, and the time that drafting takes."""

import time
from collections.abc import Sequence
from typing import final

from longtail.engine.batch import Scheduled
from longtail.speculation.drafter import Drafter
from longtail.speculation.verify import Accepted, accept


@final
class DraftClock:
    """Seconds of one step that drafting took, and what of them were the drafter's own passes."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._before = sum(drafter.forward_s for drafter in drafters)
        self._entered = self.seconds = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._drafters:
            self.seconds += time.perf_counter() - self._entered

    def forward_s(self) -> float:
        """Seconds of forward passes since the clock was made."""
        return sum((drafter.forward_s for drafter in self._drafters), 0.0) - self._before


def accept_drafts(
    drawing: Sequence[Scheduled], tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[dict[str, Accepted], dict[str, list[float]]]:
    """Follow the draws of each request through its draft; logprobs are those of what it reads."""
    accepted: dict[str, Accepted] = {}
    read: dict[str, list[float]] = {}
    first = 0
    for each in drawing:
        name, end = each.active.request_id, first + 1 + each.draft.size
        found = accepted[name] = accept(each.draft, tokens[first:end])
        read[name] = [logprobs[first + node] for node in (0, *found.path)]
        first = end
    return accepted, read
