"""From tokens to text while they arrive: stop strings and streaming.

Decoding is a function `tokens -> str` handed in; a token need not be a whole character, and
decoding may treat the first token specially, so both readers decode a short window with context in
front.
"""

from collections.abc import Callable, Sequence

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

    Only a window at the end is decoded: each character of a stop string takes at most one token,
    or `_CONTEXT` tokens of bytes.
    """
    if not stops:
        return False
    window = max(map(len, stops)) + _CONTEXT
    if find_stop(decode(generated[-window:]), stops) is None:
        return False
    return find_stop(decode(generated), stops) is not None


def final_text(generated: Sequence[int], stops: Sequence[str], decode: Decode) -> str:
    """Text of a finished completion, cut before the earliest stop string."""
    text = decode(generated)
    return text[: find_stop(text, stops)]


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces joined are the decoded whole.

    A piece is held back while it ends in an unfinished character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._context, self._read = 0, 0

    def feed(self, tokens: Sequence[int]) -> str:
        """Take new tokens, return the text they complete (maybe empty)."""
        self._tokens += tokens
        before = self._decode(self._tokens[self._context : self._read])
        now = self._decode(self._tokens[self._context :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._context = max(self._context, self._read - _CONTEXT)
        self._read = len(self._tokens)
        return now[len(before) :]
