"""Strict parsing of external JSON: requests, data files, configuration.

A text is either parsed to a value that can be encoded and written again, or refused. Unlike
`json.loads`, this refuses half a surrogate pair, NaN and numbers beyond the range of a float.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from longtail.errors import JsonError

MAX_DEPTH = 100
"""Maximum nesting of lists and objects."""
MAX_DIGITS = 308
"""Maximum number of digits of an integer: a number of 308 digits fits a float."""

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text; bytes are decoded as UTF-8.

    Raises JsonError for bytes that are not UTF-8, malformed JSON, more than MAX_DEPTH levels, an
    integer of more than MAX_DIGITS digits, half a surrogate pair and, unless `allow_nan`, a number
    that is not finite. The message can follow the name of the source.
    """
    text = _decoded(text)
    number = float if allow_nan else _finite_number
    constant = float if allow_nan else _refuse_constant
    try:
        value = json.loads(text, parse_int=_integer, parse_float=number, parse_constant=constant)
    except json.JSONDecodeError as error:
        where = f"column {error.colno}"
        where = where if error.lineno == 1 else f"line {error.lineno}, {where}"
        raise JsonError(f"not valid JSON ({error.msg} at {where})") from error
    except RecursionError:
        raise _too_deep() from None
    _check_values(value, strings=_SURROGATE_ESCAPE.search(text) is not None)
    return value


def find_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate, which UTF-8 cannot encode; None without one.

    Example: find_surrogate("a\\ud83d") == 1, find_surrogate("abc") is None
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        try:
            return text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise JsonError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    _check_string(text)
    return text


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise JsonError(
            f"the integer {digits[:8]}... has {len(digits.lstrip('-'))} digits: give at most "
            f"{MAX_DIGITS}"
        )
    return int(digits)


def _finite_number(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        shown = digits if len(digits) <= 20 else f"{digits[:20]}..."
        raise JsonError(f"the number {shown} is too large: give at most {MAX_DIGITS} digits")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number: give a finite number or null")


def _check_values(value: Any, *, strings: bool) -> None:
    """Check level by level, without recursion, so that no depth overflows the stack."""
    level, depth = [value], 0
    while level:
        if depth == MAX_DEPTH and any(isinstance(each, dict | list) for each in level):
            raise _too_deep()
        if strings:
            for each in level:
                for text in _strings(each):
                    _check_string(text)
        level, depth = [child for each in level for child in _children(each)], depth + 1


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_string(text: str) -> None:
    index = find_surrogate(text)
    if index is not None:
        raise JsonError(
            f"a string holds {text[index]!a}, half of a surrogate pair: give the whole character"
        )


def _too_deep() -> JsonError:
    return JsonError(f"lists or objects are nested more than {MAX_DEPTH} deep: flatten them")
