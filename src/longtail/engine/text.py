"""Text of tokens as they arrive: stop strings, streaming, and which characters were drafted.

A token need not be a whole character: of one that is unfinished the text ends in U+FFFD. The text
of tokens behind a whole character does not depend on those before (`Tokenizer.decode`).
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import final

from longtail.generator import StepReport
from longtail.types import Completion, Request

Decode = Callable[[Sequence[int]], str]

_CONTEXT = 8
"""Tokens of context before new ones: enough for any character."""


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Return the index of the earliest stop string; None without any.

    Example: find_stop("4 2</a> ok", ("</a>", "ok")) == 3
    """
    found = [index for stop in stops if (index := text.find(stop)) >= 0]
    return min(found, default=None)


def ends_in_stop(generated: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Return whether the newest token completes a stop string.

    Only a window at the end is decoded: each byte of a stop string takes at most one token.
    """
    if not stops:
        return False
    window = max(len(stop.encode()) for stop in stops) + _CONTEXT
    if find_stop(decode(generated[-window:]), stops) is None:
        return False
    return find_stop(decode(generated), stops) is not None


def final_text(generated: Sequence[int], stops: Sequence[str], decode: Decode) -> str:
    """Return the text of a finished completion, cut before the earliest stop string."""
    text = decode(generated)
    return text[: find_stop(text, stops)]


@final
class Reader:
    """Streams the text of one request without its stop strings.

    A piece is held back while it ends in an unfinished character, or in what may become a stop
    string.
    Lifecycle: feed* -> finish; the pieces concatenated are the text of the completion.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, stops
        self._held_len = max((len(stop) for stop in stops), default=1) - 1
        self._unread: list[int] = []
        """Tokens behind the last whole character."""
        self._held = ""
        self._shown = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that can be shown now, possibly empty."""
        self._held += self._decoded(tokens)
        cut = find_stop(self._held, self._stops)
        end = max(len(self._held) - self._held_len, 0) if cut is None else cut
        piece, self._held = self._held[:end], self._held[end:]
        self._shown += len(piece)
        return piece

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that they complete, possibly empty."""
        self._unread += tokens
        text = self._decode(self._unread)
        if text.endswith("\ufffd"):
            return ""
        self._unread = []
        return text

    def finish(self, text: str) -> str:
        """Return the held-back text, given the text of the completion."""
        return text[self._shown :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of a streamed completion."""

    text: str
    drafted: bool
    """Whether the piece was drafted; the last token of every step is not."""


def stream(
    reports: Generator[StepReport], decode: Decode, request: Request
) -> Generator[Piece | Completion]:
    """Yield the text of one request piece by piece, then its completion.

    `reports` are the steps until it is finished. The pieces concatenated are the completion's
    `text`, without any stop string.
    """
    name, reader = request.request_id, Reader(decode, request.sampling.stop)
    with closing(reports):  # also if the consumer stops reading
        for report in reports:
            own = [each.token for each in report.emitted if each.request_id == name]
            drafted = sum(each.num_accepted for each in report.verified if each.request_id == name)
            for tokens, is_drafted in ((own[:drafted], True), (own[drafted:], False)):
                if text := reader.feed(tokens):
                    yield Piece(text=text, drafted=is_drafted)
            for completion in report.finished:
                if completion.request_id == name:
                    if text := reader.finish(completion.text):
                        yield Piece(text=text, drafted=False)
                    yield completion


@final
class AcceptedSpans:
    """Accepted drafts of a rollout, by request. `add` runs in the engine's hot loop: it appends.

    tokens   4 | 2 7 7 | 1        accepted after token 1: 3        text "a bcc d"
    spans        1 . . 4          characters                            1 . . 5
    """

    def __init__(self) -> None:
        self._places: dict[str, list[int]] = {}

    def add(self, step: StepReport) -> None:
        """Add the accepted drafts of a step."""
        for each in step.verified:
            if each.num_accepted:
                span = (each.position, each.position + each.num_accepted)
                self._places.setdefault(each.request_id, []).extend(span)

    def characters(
        self, completions: Iterable[Completion], decode: Decode
    ) -> dict[str, tuple[int, ...]]:
        """Return begin, end, begin, end, ... in characters of each text with accepted drafts."""
        cached = cache(decode)

        def decode_once(tokens: Sequence[int]) -> str:
            return cached(tuple(tokens))

        return {
            each.request_id: characters(each.tokens, each.text, places, decode_once)
            for each in completions
            if (places := self._places.get(each.request_id))
        }


def characters(
    tokens: Sequence[int], text: str, places: Sequence[int], decode: Decode
) -> tuple[int, ...]:
    """Convert numbers of tokens to numbers of characters of their text.

    The text may end before the tokens do: stop strings and tokens after the end are cut. A
    character of several tokens belongs to the last of them. Returns () for a text to which the
    texts of its tokens do not add up.
    """
    reader = Reader(decode, ())
    pieces = [reader.feed([token]) for token in tokens]
    whole = "".join(pieces)
    if not (whole.startswith(text) or text.startswith(whole)):
        return ()
    ends = [0, *accumulate(map(len, pieces))]
    return tuple(min(ends[min(place, len(tokens))], len(text)) for place in places)
