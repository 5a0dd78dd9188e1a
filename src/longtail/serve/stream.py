"""What a caller gets for its call: completions, chunk by chunk, until it has them all or leaves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import final

from longtail.errors import LongtailError
from longtail.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a completion ended, and what drafting did for it.

    Example: Ending(reason=FinishReason.STOP, num_tokens=40, num_drafted=30, num_accepted=22,
                    num_verified=10): 22 of its 40 tokens were foretold
    """

    reason: FinishReason
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_verified: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What one engine step wrote of one completion.

    Example: Chunk(choice=0, text=" 42", tokens=(17, 4), logprobs=(-0.1, -1.5), ending=None)
    """

    choice: int
    text: str
    """May lag behind the tokens: nothing of a stop string is shown, no broken character."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Ending | None


@final
class Generation:
    """The completions of one call. `async with`, then `async for`; to leave is to give them up."""

    def __init__(self, names: Sequence[str], leave: Callable[["Generation"], None]) -> None:
        self.open = set(names)
        """Request ids that did not end yet."""
        self.news: asyncio.Queue[Chunk | LongtailError] = asyncio.Queue()
        self._unread = len(names)
        self._leave = leave

    async def __aenter__(self) -> "Generation":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave(self)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they are written. Raises UnavailableError when no more will come."""
        while self._unread:
            item = await self.news.get()
            if isinstance(item, LongtailError):
                raise item
            self._unread -= item.ending is not None
            yield item
