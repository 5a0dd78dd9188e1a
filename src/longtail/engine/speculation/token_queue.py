"""The queue of computed tokens that the drafters have not observed yet.

Drafters observe before their next proposals. During plain decoding a step only appends to the
queue, and steps beyond the drafters' lookback are dropped.
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
from longtail.speculation.tree import Accepted

_BYTES = 64 * 2**20
"""Maximum bytes of features in the queue."""
_STEPS = 512
"""Maximum number of steps in the queue, for a drafter with unlimited lookback."""


@dataclass(frozen=True, slots=True)
class Computed:
    """One computed step."""

    scheduled: Sequence[Scheduled]
    ends: Sequence[int]
    """Number of computed tokens of each scheduled request."""
    accepted: Mapping[str, Accepted]
    features: Float[Tensor, "tokens features"] | None
    """Features of all flat tokens."""

    def spans(self) -> Iterator["TokenSpan"]:
        """Yield the computed tokens of each request, without rejected nodes."""
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
    """Consecutive tokens of a request from one step; `rows` are their rows in its features."""

    active: ActiveRequest
    start: int
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class ObservationBatch:
    """Tokens that drafters observe in one call."""

    seen: list[Observed]
    features: Tensor | None
    """Features of the tokens in `seen`, in order."""
    done: tuple[str, ...]
    """Requests among them that have left the engine."""


@final
class ObservationQueue:
    """Steps to observe, the oldest first."""

    def __init__(self, lookback: int = 0, max_bytes: int = _BYTES) -> None:
        self._steps: deque[Computed] = deque()
        self._max_bytes = max_bytes
        self._most = min(lookback or _STEPS, _STEPS)
        self._num_bytes = 0

    def __len__(self) -> int:
        """Return the number of steps to observe."""
        return len(self._steps)

    def add(self, step: Computed) -> None:
        """Append a step."""
        self._steps.append(step)
        self._num_bytes += _size(step.features)
        while len(self._steps) > 1 and (
            len(self._steps) > self._most or self._num_bytes > self._max_bytes
        ):
            self._num_bytes -= _size(self._steps.popleft().features)

    def clear(self) -> None:
        """Drop all steps."""
        self._steps.clear()
        self._num_bytes = 0

    def take(self, *, with_done: bool) -> Iterator[ObservationBatch]:
        """Empty the queue in batches: steps merged by request, tokens in order.

        `with_done` includes requests that have left, which drafters that read features ignore. A
        step that ends a prompt is the last of its batch: siblings of that prompt come later.
        """
        steps = list(self._steps)
        self.clear()
        part: list[Computed] = []
        for step in steps:
            part.append(step)
            if any(each.num_tokens > 1 for each in step.scheduled):  # it may end a prompt
                yield self._merge(part, with_done)
                part = []
        if part:
            yield self._merge(part, with_done)

    @staticmethod
    def _merge(steps: Sequence[Computed], with_done: bool) -> ObservationBatch:
        """Merge steps to one batch."""
        spans: dict[ActiveRequest, list[tuple[int, list[int]]]] = {}
        first = 0
        for step in steps:
            for each in step.spans():
                if each.active.is_done and not with_done:
                    continue
                own = spans.setdefault(each.active, [])
                if not own or own[-1][0] + len(own[-1][1]) != each.start:  # recomputed
                    own.append((each.start, []))
                own[-1][1].extend(first + row for row in each.rows)
            first += 0 if step.features is None else len(step.features)
        seen = [
            Observed(
                request_id=active.request_id,
                tokens=active.tokens,
                start=start,
                num_tokens=len(rows),
                prompt_len=active.prompt_len,
                is_finished=active.is_finished,
            )
            for active, own in spans.items()
            for start, rows in own
        ]
        done = tuple(active.request_id for active in spans if active.is_done)
        held = [step.features for step in steps if step.features is not None]
        if not held:
            return ObservationBatch(seen, None, done)
        order = [row for own in spans.values() for _, rows in own for row in rows]
        every = held[0] if len(held) == 1 else torch.cat(held)
        if len(order) < len(every) or order != list(range(len(every))):
            every = every[torch.tensor(order, dtype=torch.int64, device=every.device)]
        return ObservationBatch(seen, every, done)


def _size(features: Tensor | None) -> int:
    return 0 if features is None else features.numel() * features.element_size()
