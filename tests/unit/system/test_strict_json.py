"""External JSON is parsed to a plain value or refused with one sentence."""

import json

import pytest

from longtail.errors import JsonError
from longtail.system.files import MAX_DEPTH, MAX_DIGITS, find_surrogate, parse_json


def test_output_of_json_dumps_is_parsed() -> None:
    value = {"a": [1, -2.5, "\u4e2d\U0001f600", None, True, {}], "": 10**MAX_DIGITS - 1}
    for ascii_only in (True, False):
        text = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_json(text) == parse_json(text.encode()) == value
    assert parse_json(b"\xef\xbb\xbf[1]") == [1]  # a byte order mark, as Windows writes it


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b'{"a": "\xff"}', "not UTF-8 (invalid start byte at byte 7)"),
        ('{"a": }', "not valid JSON (Expecting value at line 1, column 7)"),
        ("{\n]", "at line 2, column 1)"),
        ('"\\ud83d"', "'\\ud83d', half of a surrogate pair"),
        ('{"\\uDE00": 1}', "'\\ude00', half of a surrogate pair"),
        ('[[{"a": ["\\ud83d x \\ude00"]}]]', "half of a surrogate pair"),
        ('"\ud83d"', "half of a surrogate pair"),
        (b'"\xed\xa0\xbd"', "not UTF-8"),
        ("9" * 5000, "an integer has more than 308 digits"),
        ("-" + "9" * 309, "more than 308 digits"),
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested more than 100 deep"),
        ("[" * 101 + "]" * 101, "nested more than 100 deep"),
        ("[NaN]", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e999", "a number is too large"),
        (b"", "not valid JSON"),
        (b"\x00", "not valid JSON"),
    ],
    ids=range(18),
)
def test_malformed_json_is_refused_with_the_reason(text: str | bytes, sentence: str) -> None:
    with pytest.raises(JsonError) as refused:
        parse_json(text)
    message = str(refused.value)
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 150
    assert message.encode()


def test_values_at_the_bounds_are_parsed() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert float(parse_json("9" * MAX_DIGITS)) > 1e307
    assert parse_json('"\\ud83d\\ude00 \\\\ud83d"') == "\U0001f600 \\ud83d"


def test_nan_and_infinity_are_parsed_if_allowed() -> None:
    assert str(parse_json("[NaN, -Infinity, 1e999]", allow_nan=True)) == "[nan, -inf, inf]"


def test_find_surrogate_finds_lone_surrogates_only() -> None:
    assert find_surrogate("ab\ud83d") == 2
    assert find_surrogate("\U0001f600 \u00e9") is None
