"""Completions of one call: the caller's stream of chunks, and the state of each request.

An engine that fails is replaced, and its successor generates the text again from the beginning. The
text is a function of the request, so tokens that the caller already has are skipped.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from longtail.engine.report import Emitted, Verified
from longtail.engine.text import Reader
from longtail.errors import CompletionError, LongtailError
from longtail.types import Completion, FinishReason, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Finish reason and speculation counts of a finished completion.

    Example: Ending(reason=FinishReason.STOP, num_tokens=40, num_drafted=30, num_accepted=22,
                    num_verified=10, policy_version=0): 22 of its 40 tokens were accepted draft
                    tokens
    """

    reason: FinishReason
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_verified: int
    policy_version: int
    """Version of the weights that wrote the whole text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that one engine step generated for one completion.

    Example: Chunk(choice=0, text=" 42", tokens=(17, 4), logprobs=(-0.1, -1.5), ending=None)
    """

    choice: int
    text: str
    """Text that is ready; it may lag behind the tokens, so that no part of a stop string and no
    broken character is shown."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    ending: Ending | None
    """Set in the last chunk of a completion."""
    is_rewrite: bool = False
    """Whether earlier chunks are void, since the weights were changed: a text begins anew."""


@final
class CompletionStream:
    """Chunks of one call's completions. Use `async with`, then `async for`.

    Leaving the `async with` block aborts the completions that have not finished.
    """

    def __init__(
        self, request_ids: Sequence[str], abort: Callable[["CompletionStream"], None]
    ) -> None:
        self.unfinished = set(request_ids)
        """Request ids of the completions that have not finished."""
        self.queue: asyncio.Queue[Chunk | LongtailError] = asyncio.Queue()
        self._num_unread = len(request_ids)
        self._abort = abort

    async def __aenter__(self) -> "CompletionStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort(self)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks as they are generated. Raises the LongtailError that ended a completion."""
        while self._num_unread:
            item = await self.queue.get()
            if isinstance(item, LongtailError):
                raise item
            self._num_unread -= item.ending is not None
            yield item


@dataclass(slots=True, eq=False)
class RequestState:
    """One request of a call, from its submission until its last chunk.

    Only the engine thread reads and writes it while the engine holds the request.
    """

    request: Request
    stream: CompletionStream
    choice: int
    reader: Reader
    submitted_at: float
    """Time of the submission, of `time.monotonic`."""
    first_token_at: float | None = None
    num_failures: int = 0
    """Number of engines that failed while they may have been generating this completion."""
    sent: list[int] = field(default_factory=list)
    """Tokens that the caller has received."""
    num_replayed: int = 0
    """Number of sent tokens that the present engine has generated."""
    num_drafted: int = 0
    num_accepted: int = 0
    num_verified: int = 0
    policy_version: int = 0
    """Version of the weights that write the text."""
    is_rewritten: bool = False
    """Whether the caller has tokens of earlier weights, which the next chunk makes void."""

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.request.request_id

    def restart(self) -> None:
        """Expect the text from its beginning."""
        self.num_replayed = self.num_drafted = self.num_accepted = self.num_verified = 0

    def rewrite(self) -> None:
        """Expect another text, since the weights were changed."""
        self.is_rewritten = self.is_rewritten or bool(self.sent)
        self.sent.clear()
        self.reader.restart()

    def count(self, verified: Verified) -> None:
        """Add one verified draft to the speculation counts."""
        self.num_verified += 1
        self.num_drafted += verified.num_drafted
        self.num_accepted += verified.num_accepted

    def chunk(self, emitted: Sequence[Emitted], completion: Completion | None) -> Chunk | None:
        """Return the tokens of a step that the caller does not have, or None if there are none.

        Raises CompletionError if regenerated text differs from the text that was sent. That happens
        only where the numerics depend on the batch.
        """
        known = self.sent[self.num_replayed : self.num_replayed + len(emitted)]
        if known != [each.token for each in emitted[: len(known)]]:
            raise CompletionError(
                "the engine was restarted and generated a different text; send the request again"
            )
        new = emitted[len(known) :]
        self.num_replayed += len(emitted)
        if not new:
            return None
        tokens = [each.token for each in new]
        text, ending = self.reader.feed(tokens), None
        self.sent += tokens
        if completion is not None:
            text += self.reader.finish(completion.text)
            ending = self._ending(completion.finish_reason)
        is_rewrite, self.is_rewritten = self.is_rewritten, False
        return Chunk(
            choice=self.choice,
            text=text,
            tokens=tuple(tokens),
            logprobs=tuple(each.logprob for each in new),
            ending=ending,
            is_rewrite=is_rewrite,
        )

    def last_chunk(self, completion: Completion) -> Chunk:
        """Return the end of a completion that is aborted here; it has no more tokens."""
        return Chunk(
            choice=self.choice,
            text=self.reader.finish(completion.text),
            tokens=(),
            logprobs=(),
            ending=self._ending(completion.finish_reason),
            is_rewrite=self.is_rewritten,
        )

    def _ending(self, reason: FinishReason) -> Ending:
        return Ending(
            reason=reason,
            num_tokens=len(self.sent),
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_verified=self.num_verified,
            policy_version=self.policy_version,
        )
