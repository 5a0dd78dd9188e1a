"""What the target computed and the drafter was not told yet.

A drafter is told when it is next asked for drafts. While the engine decodes plainly nobody needs to
be, so a step costs two appends, and what is older than the drafter's use for it falls off the end.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.speculation.drafter import Seen

_BYTES = 64 * 2**20
"""Features that may wait."""
_STEPS = 512
"""Steps that may wait."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a request that one step computed; `rows` says where in its features."""

    active: ActiveRequest
    start: int
    rows: Sequence[int]


_Step = tuple[list[Stretch], Tensor | None]


@dataclass(frozen=True, slots=True)
class News:
    """What drafters are to be told at once."""

    seen: list[Seen]
    features: Tensor | None
    """Of the tokens in `seen`, in order."""
    done: tuple[str, ...]
    """Requests among them that have left."""


@final
class Backlog:
    """Steps that wait to be told, the oldest first."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()
        self._num_bytes = 0

    def add(
        self, stretches: list[Stretch], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Keep one step."""
        self._steps.append((stretches, features))
        self._num_bytes += _size(features)
        while len(self._steps) > 1 and (len(self._steps) > _STEPS or self._num_bytes > _BYTES):
            self._num_bytes -= _size(self._steps.popleft()[1])

    def clear(self) -> None:
        """Drop everything."""
        self._steps.clear()
        self._num_bytes = 0

    def take(self, *, with_done: bool) -> Iterator[News]:
        """Hand out what waits: steps joined, request by request, tokens in order.

        `with_done` also of requests that have left; who reads features has no use for those.
        A step that ends a prompt is the last of its record: siblings of that prompt come after.
        """
        steps = list(self._steps)
        self._steps.clear()
        self._num_bytes = 0
        part: list[_Step] = []
        for step in steps:
            part.append(step)
            if any(_ends_prompt(each) for each in step[0]):
                yield self._joined(part, with_done)
                part = []
        if part:
            yield self._joined(part, with_done)

    @staticmethod
    def _joined(steps: Sequence[_Step], with_done: bool) -> News:
        """Make one record of some steps."""
        spans: dict[ActiveRequest, list[tuple[int, list[int]]]] = {}
        first = 0
        for stretches, features in steps:
            for each in stretches:
                if each.active.is_done and not with_done:
                    continue
                mine = spans.setdefault(each.active, [])
                if not mine or mine[-1][0] + len(mine[-1][1]) != each.start:  # computed anew
                    mine.append((each.start, []))
                mine[-1][1].extend(first + row for row in each.rows)
            first += 0 if features is None else len(features)
        seen = [
            Seen(
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
        held = [features for _, features in steps if features is not None]
        if not held:
            return News(seen, None, done)
        order = [row for mine in spans.values() for _, rows in mine for row in rows]
        every = held[0] if len(held) == 1 else torch.cat(held)
        if len(order) < len(every) or order != list(range(len(every))):
            every = every[torch.tensor(order, dtype=torch.int64, device=every.device)]
        return News(seen, every, done)


def _ends_prompt(stretch: Stretch) -> bool:
    return stretch.start < stretch.active.prompt_len <= stretch.start + len(stretch.rows)


def _size(features: Tensor | None) -> int:
    return 0 if features is None else features.numel() * features.element_size()
