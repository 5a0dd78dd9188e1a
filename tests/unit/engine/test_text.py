"""Stop strings, streaming, drafted characters.

Tokens are words, bytes, or bytes decoded a run at a time.
"""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from longtail.engine.text import (
    Decode,
    Reader,
    characters,
    ends_in_stop,
    final_text,
    find_stop,
)
from support.fakes import decode_pieces
from support.tiny_models import sentencepiece_tokenizer

TEXTS = st.text(alphabet="ab <>/\u00e9\u65e5\u672c\U0001f600\u2581", max_size=30)
BYTES = decode_pieces([bytes([value]) for value in range(256)])
"""A token a byte."""


SENTENCEPIECE = sentencepiece_tokenizer()


def in_steps(tokens: list[int], decode: Decode) -> str:
    """Stream the tokens one by one."""
    reader = Reader(decode, ())
    return "".join([*(reader.feed([token]) for token in tokens), reader.finish(decode(tokens))])


def test_the_earliest_stop_counts():
    assert find_stop("4 2</a> ok", ("ok", "</a>")) == 3
    assert find_stop("4 2", ("ok", "</a>")) is None
    assert final_text([0, 1, 2], ("lo w", "rld"), decode_pieces(["hel", "lo wo", "rld"])) == "hel"


@given(before=TEXTS, stop=TEXTS.filter(bool))
def test_a_stop_of_any_characters_is_seen_at_its_last_byte(before, stop):
    """A window of as many tokens as the stop has characters used to miss the bytes of long ones."""
    text = before + stop
    first = text.index(stop) + len(stop)
    tokens = list(text[:first].encode())
    assert ends_in_stop(tokens, (stop,), BYTES)
    assert not any(ends_in_stop(tokens[:n], (stop,), BYTES) for n in range(len(tokens)))


@given(tokens=st.lists(st.integers(0, 255), max_size=40))
def test_streamed_pieces_join_to_the_text_even_of_broken_bytes(tokens):
    """A text that ended inside a character used to lose its end."""
    assert in_steps(tokens, BYTES) == BYTES(tokens)


@given(tokens=st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), min_size=1, max_size=40))
def test_tokens_of_sentencepiece_are_streamed_as_they_are_decoded(tokens):
    """A newline that is a byte was lost beside a cut character; first spaces were in no piece."""
    assert in_steps(tokens, SENTENCEPIECE.decode) == SENTENCEPIECE.decode(tokens)


@pytest.mark.parametrize("gap", [1, 20])
def test_tokens_without_text_are_passed_over(gap):
    decode = decode_pieces(["", "a", "b"])
    assert in_steps([1, *[0] * gap, 2, 0, 1], decode) == "aba"
    assert final_text([1, *[0] * gap, 2], (), decode) == "ab"


def test_long_texts_are_decoded_a_window_at_a_time():
    longest = 0

    def decode(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return BYTES(tokens)

    text, reader = "ab\u65e5" * 100, Reader(decode, ())
    assert "".join(reader.feed([token]) for token in text.encode()) == text
    assert longest < 20


@given(text=TEXTS, stops=st.lists(TEXTS.filter(bool), max_size=3))
def test_the_streamed_text_is_the_final_text(text, stops):
    """Tokens come until `ends_in_stop` finds a stop."""
    reader, written, shown = Reader(BYTES, stops), [], ""
    for token in text.encode():
        written.append(token)
        shown += reader.feed([token])
        if ends_in_stop(written, stops, BYTES):
            break
    final = final_text(written, stops, BYTES)
    assert final.startswith(shown)
    assert shown + reader.finish(final) == final


SYMBOLS = ("a", " b", "\u00e9", b"\xe2\x82", b"\xac", "\U0001f600", b" c\xc3", b"\xa9")
as_bytes = decode_pieces(SYMBOLS)
"""A byte-level tokenizer: a character may have several tokens."""


@given(
    tokens=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    places=st.lists(st.integers(0, 34), max_size=6).map(sorted),
    cut=st.integers(0, 3),
)
def test_spans_of_whole_characters_are_exact(tokens, places, cut) -> None:
    whole = as_bytes(tokens)
    assume("\ufffd" not in whole)
    text = whole[: len(whole) - cut]
    found = characters(tokens, text, places, as_bytes)
    assert list(found) == sorted(found)
    for place, at in zip(places, found, strict=True):
        before = as_bytes(tokens[:place])
        if whole.startswith(before):  # no character is cut in two here
            assert at == min(len(before), len(text))


def test_a_character_of_several_tokens_belongs_to_the_last_of_them() -> None:
    tokens = [0, 2, 3, 4, 1, 6, 7]  # a, e with accent, two thirds and the rest of a euro sign, ...
    text = as_bytes(tokens)
    assert text == "a\u00e9\u20ac b c\u00e9"
    places = [0, 3, 3, 4, 5, 6, 6, 99]
    assert characters(tokens, text, places, as_bytes) == (0, 2, 2, 3, 5, 5, 5, 8)
    assert characters(tokens, text.upper(), places, as_bytes) == ()
    assert characters([4, *tokens], as_bytes([4, *tokens]), [1, 2], as_bytes) == (0, 2)
