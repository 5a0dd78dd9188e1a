"""Accepted drafts in characters: the tokens' own characters, with every kind of decoder."""

from collections.abc import Callable, Sequence

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.engine.text import TokenTexts
from support.fakes import decode_pieces

WORDS = (" a", " bc", " def", "g", "", " ", "h i", "\n")
SYMBOLS = ("a", " b", "\u00e9", b"\xe2\x82", b"\xac", "\U0001f600", b" c\xc3", b"\xa9")


concatenated = decode_pieces(WORDS)
as_bytes = decode_pieces(SYMBOLS)
"""Byte-level tokenizers: a character may have several tokens."""


def without_first_space(tokens: Sequence[int]) -> str:
    """Decode like SentencePiece, which drops a first space."""
    return concatenated(tokens).removeprefix(" ")


@pytest.mark.parametrize("decode", [concatenated, without_first_space, as_bytes])
def test_spans_of_whole_characters_are_exact(decode: Callable[[Sequence[int]], str]) -> None:
    pieces = TokenTexts(decode)

    @given(
        tokens=st.lists(st.integers(0, 7), min_size=1, max_size=30),
        places=st.lists(st.integers(0, 34), max_size=6).map(sorted),
        cut=st.integers(0, 3),
    )
    def law(tokens: list[int], places: list[int], cut: int) -> None:
        whole = decode(tokens)
        hypothesis.assume("\ufffd" not in whole)
        text = whole[: len(whole) - cut]
        found = pieces.characters(tokens, text, places)
        if not "".join(pieces.pieces(tokens)).startswith(text):
            assert found == ()  # a cut character, which no token completes
            return
        assert list(found) == sorted(found)
        for place, at in zip(places, found, strict=True):
            before = decode(tokens[:place])
            if whole.startswith(before):  # no character is cut in two here
                assert at == min(len(before), len(text))

    law()


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    tokens = [0, 2, 3, 4, 1, 6, 7]  # a, e with accent, two thirds and the rest of a euro sign, ...
    text = as_bytes(tokens)
    assert text == "a\u00e9\u20ac b c\u00e9"
    texts = TokenTexts(as_bytes)
    assert texts.pieces(tokens) == ["a", "\u00e9", "", "\u20ac", " b", "", " c\u00e9"]
    places = [0, 3, 3, 4, 5, 6, 6, 99]
    assert texts.characters(tokens, text, places) == (0, 2, 2, 3, 5, 5, 5, 8)
    assert texts.characters(tokens, text.upper(), places) == ()
