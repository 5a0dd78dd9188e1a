"""What the target computed and the drafter was not told yet.

A drafter is told when it is next asked for drafts. While the engine decodes plainly nobody needs to
be, so a step costs two appends, and what is older than the drafter's use for it falls off the end.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.speculation.drafter import Observed
from longtail.speculation.verify import Accepted

_BYTES = 64 * 2**20
"""Features that may wait."""
_STEPS = 512
"""Steps that may wait where a drafter reads all it can get."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One step that is over: what was scheduled, and what came of it."""

    scheduled: Sequence[Scheduled]
    ends: Sequence[int]
    """Of each: its tokens that are computed now."""
    accepted: Mapping[str, Accepted]
    features: Float[Tensor, "tokens features"] | None
    """Of all flat tokens."""

    def spans(self) -> Iterator["TokenSpan"]:
        """Say of each request what was computed for good, as far as its text goes."""
        first = 0
        for each, end in zip(self.scheduled, self.ends, strict=True):
            last = first + each.num_tokens
            rows: Sequence[int] = range(first, last)
            if each.draft.size:
                path = self.accepted[each.active.request_id].path
                rows = [*rows, *(last - 1 + node for node in path)]
            start = end - len(rows)
            yield TokenSpan(each.active, start, rows[: len(each.active.tokens) - start])
            first = last + each.draft.size


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Consecutive tokens of a request that one step computed; `rows` says where in its features."""

    active: ActiveRequest
    start: int
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class ObservationBatch:
    """What drafters are to be told at once."""

    seen: list[Observed]
    features: Tensor | None
    """Of the tokens in `seen`, in order."""
    done: tuple[str, ...]
    """Requests among them that have left."""


@final
class ObservationQueue:
    """Steps that wait to be told, the oldest first."""

    def __init__(self, lookback: int = 0) -> None:
        self._steps: deque[Computed] = deque()
        self._most = min(lookback or _STEPS, _STEPS)
        self._num_bytes = 0

    def add(self, step: Computed) -> None:
        """Keep one step."""
        self._steps.append(step)
        self._num_bytes += _size(step.features)
        while len(self._steps) > 1 and (len(self._steps) > self._most or self._num_bytes > _BYTES):
            self._num_bytes -= _size(self._steps.popleft().features)

    def inherit(self, other: "ObservationQueue") -> None:
        """Take over what another one kept."""
        for step in other._steps:
            self.add(step)

    def clear(self) -> None:
        """Drop everything."""
        self._steps.clear()
        self._num_bytes = 0

    def take(self, *, with_done: bool) -> Iterator[ObservationBatch]:
        """Hand out what waits: steps joined, request by request, tokens in order.

        `with_done` also of requests that have left; who reads features has no use for those.
        A step that ends a prompt is the last of its record: siblings of that prompt come after.
        """
        steps = list(self._steps)
        self._steps.clear()
        self._num_bytes = 0
        part: list[Computed] = []
        for step in steps:
            part.append(step)
            if any(_ends_prompt(each) for each in step.scheduled):
                yield self._joined(part, with_done)
                part = []
        if part:
            yield self._joined(part, with_done)

    @staticmethod
    def _joined(steps: Sequence[Computed], with_done: bool) -> ObservationBatch:
        """Make one record of some steps."""
        spans: dict[ActiveRequest, list[tuple[int, list[int]]]] = {}
        first = 0
        for step in steps:
            for each in step.spans():
                if each.active.is_done and not with_done:
                    continue
                mine = spans.setdefault(each.active, [])
                if not mine or mine[-1][0] + len(mine[-1][1]) != each.start:  # computed anew
                    mine.append((each.start, []))
                mine[-1][1].extend(first + row for row in each.rows)
            first += 0 if step.features is None else len(step.features)
        seen = [
            Observed(
                request_id=active.request_id,
                tokens=active.tokens,
                start=start,
                num_tokens=len(rows),
                prompt_len=active.prompt_len,
            )
            for active, mine in spans.items()
            for start, rows in mine
        ]
        done = tuple(active.request_id for active in spans if active.is_done)
        held = [step.features for step in steps if step.features is not None]
        if not held:
            return ObservationBatch(seen, None, done)
        order = [row for mine in spans.values() for _, rows in mine for row in rows]
        every = held[0] if len(held) == 1 else torch.cat(held)
        if len(order) < len(every) or order != list(range(len(every))):
            every = every[torch.tensor(order, dtype=torch.int64, device=every.device)]
        return ObservationBatch(seen, every, done)


def _ends_prompt(each: Scheduled) -> bool:
    """Tell whether it may have: a step of several tokens that drew."""
    return each.num_tokens > 1


def _size(features: Tensor | None) -> int:
    return 0 if features is None else features.numel() * features.element_size()
