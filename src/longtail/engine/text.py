"""From tokens to text while they arrive: stop strings and streaming.

Decoding is a function `tokens -> str` handed in; a token need not be a whole character, and
decoding may treat the first token specially, so both readers decode a short window with context in
front.
"""

from collections.abc import Callable, Sequence
from typing import final

Decode = Callable[[Sequence[int]], str]

_CONTEXT = 8
"""Tokens decoded in front of the news: enough for any multi-byte character or leading space."""


def find_stop(text: str, stops: Sequence[str]) -> int | None:
    """Index of the earliest stop string, None if there is none.

    Example: find_stop("4 2</a> ok", ("</a>", "ok")) == 3
    """
    found = [index for stop in stops if (index := text.find(stop)) >= 0]
    return min(found, default=None)


def ends_in_stop(generated: Sequence[int], stops: Sequence[str], decode: Decode) -> bool:
    """Tell whether the newest token completed a stop string.

    Only a window at the end is decoded: each byte of a stop string takes at most one token.
    """
    if not stops:
        return False
    window = max(len(stop.encode()) for stop in stops) + _CONTEXT
    for start in range(-window, -window - 4, -1):
        text = decode(generated[start:])
        if not text.startswith("\ufffd"):  # else it begins inside a character: look further back
            break
    if find_stop(text, stops) is None:
        return False
    return find_stop(decode(generated), stops) is not None


def final_text(generated: Sequence[int], stops: Sequence[str], decode: Decode) -> str:
    """Text of a finished completion, cut before the earliest stop string."""
    text = decode(generated)
    return text[: find_stop(text, stops)]


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces joined are the decoded whole.

    A piece is held back while it ends in an unfinished character. Decoding starts at the end of a
    whole character, too: some decoders spoil a whole run of bytes that begins or ends inside one.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._ends = [0]
        """Where pieces ended: decoding starts at the first, text is handed out up to the last."""

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens, return the text they complete (maybe empty)."""
        self._tokens += tokens
        return self._news(unfinished=False)

    def flush(self) -> str:
        """Return what was held back, when no more tokens come."""
        return self._news(unfinished=True)

    def _news(self, *, unfinished: bool) -> str:
        start, read = self._ends[0], self._ends[-1]
        before = self._decode(self._tokens[start:read])
        now = self._decode(self._tokens[start:])
        if len(now) <= len(before) or (now.endswith("\ufffd") and not unfinished):
            return ""
        self._ends.append(len(self._tokens))
        while len(self._ends) > 2 and self._ends[1] <= read - _CONTEXT:
            del self._ends[0]
        return now[len(before) :]


@final
class Reader:
    """The text of one request as it may be shown while it is written: nothing of a stop string.

    What may be the beginning of a stop string is held back until it is known not to be one.
    Lifecycle: feed* -> finish; the pieces joined are the text of the completion.
    """

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = stops
        self._held_len = max((len(stop) for stop in stops), default=1) - 1
        self._held = ""
        self._shown = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens, return the text that may be shown now (maybe empty)."""
        self._held += self._detokenizer.feed(tokens)
        cut = find_stop(self._held, self._stops)
        end = max(len(self._held) - self._held_len, 0) if cut is None else cut
        piece, self._held = self._held[:end], self._held[end:]
        self._shown += len(piece)
        return piece

    def finish(self, text: str) -> str:
        """Return what was held back, given the text of the completion."""
        return text[self._shown :]
