"""Accepted drafts of finished texts: which characters of a completion were drafted.

The engine counts tokens, and a reader of a run has texts. Tokens become characters by the texts of
tokens, which are decoded once each; where those do not add up to the text, it is decoded token by
token.

    tokens   4 | 2 7 7 | 1        accepted after token 1: 3        text "a bcc d"
    spans        1 . . 4          characters                            1 . . 5
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import final

from longtail.engine.report import StepReport
from longtail.engine.text import Decode, Detokenizer
from longtail.types import Completion

_UNFINISHED = "\ufffd"
_MOST_PARTS = 8
"""Number of tokens that are decoded together before the text is taken as it is."""
Spans = Sequence[tuple[int, int]]
"""Begin and end of accepted drafts, ascending, in tokens of the completion."""


@final
class AcceptedSpans:
    """Collects accepted drafts of a rollout. `add` runs in the engine's hot loop: it appends."""

    def __init__(self) -> None:
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def add(self, step: StepReport) -> None:
        """Add the accepted drafts of a step."""
        for each in step.verified:
            if each.num_accepted:
                span = (each.position, each.position + each.num_accepted)
                self._spans.setdefault(each.request_id, []).append(span)

    def characters(
        self, completions: Iterable[Completion], decode: Decode
    ) -> dict[str, tuple[int, ...]]:
        """Return begin, end, begin, end, ... in characters of each text with accepted drafts."""
        texts = TokenTexts(decode)
        return {
            each.request_id: drafted_characters(each.tokens, each.text, spans, texts)
            for each in completions
            if (spans := self._spans.get(each.request_id))
        }


@final
class TokenTexts:
    """Texts of tokens behind another token, decoded once each.

    Tokens that are parts of a character are decoded together.
    """

    def __init__(self, decode: Decode) -> None:
        self.decode = decode
        self._anchor: list[int] = []
        """A token before the decoded ones: some decoders drop the space of a first token."""
        self._anchor_len = 0
        self._texts: dict[tuple[int, ...], str] = {}

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that each token completes; joined, they are the text of most tokens."""
        pieces = [self.decode(tokens[:1])]
        if not self._anchor and pieces[0] and _UNFINISHED not in pieces[0]:
            self._anchor, self._anchor_len = [tokens[0]], len(pieces[0])
        part: tuple[int, ...] = ()
        for token in tokens[1:]:
            part = (*part, token)
            text = self._text(part)
            is_whole = _UNFINISHED not in text or len(part) == _MOST_PARTS
            pieces.append(text if is_whole else "")
            part = () if is_whole else part
        return pieces

    def _text(self, tokens: tuple[int, ...]) -> str:
        if tokens not in self._texts:
            self._texts[tokens] = self.decode([*self._anchor, *tokens])[self._anchor_len :]
        return self._texts[tokens]


def drafted_characters(
    tokens: Sequence[int], text: str, spans: Spans, texts: TokenTexts
) -> tuple[int, ...]:
    """Return begin, end, begin, end, ... of accepted drafts in characters of the text.

    The text may end before the tokens do: stop strings and tokens after the end are cut. A
    character of several tokens belongs to the last of them.
    """
    places = [min(place, len(tokens)) for span in spans for place in span]
    if not places:
        return ()
    pieces = texts.pieces(tokens)
    if not "".join(pieces).startswith(text):
        detokenizer = Detokenizer(texts.decode)
        pieces = [detokenizer.feed([token]) for token in tokens]
    ends = [0, *accumulate(map(len, pieces))]
    return tuple(min(ends[place], len(text)) for place in places)
