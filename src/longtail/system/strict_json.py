"""Strict parsing of external JSON: requests, data files, configuration.

A text is either parsed to a value that can be encoded and written again, or refused. Unlike
`json.loads`, this refuses half a surrogate pair, NaN and numbers beyond the range of a float.
"""

import json
from typing import Any, NoReturn

from longtail.errors import JsonError

MAX_DEPTH = 100
"""Maximum nesting of lists and objects."""
MAX_DIGITS = 308
"""Maximum number of digits of an integer: a number of 308 digits fits a float."""


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text; bytes are decoded as UTF-8.

    Raises JsonError for text that is not JSON, more than MAX_DEPTH levels, an integer of more than
    MAX_DIGITS digits, half a surrogate pair and, unless `allow_nan`, a number that is not finite.
    """
    constant = float if allow_nan else _refuse_constant
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_integer, parse_constant=constant)
        json.dumps(value, ensure_ascii=False, allow_nan=allow_nan).encode()
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise JsonError(f"a string holds {half!a}, half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"not valid JSON ({error.msg} at {where})") from error
    except RecursionError:
        raise JsonError(f"nested more than {MAX_DEPTH} deep: flatten it") from None
    except JsonError:
        raise
    except ValueError as error:  # 1e999
        raise JsonError(f"a number is too large: give at most {MAX_DIGITS} digits") from error
    if _is_deeper(value, MAX_DEPTH):
        raise JsonError(f"nested more than {MAX_DEPTH} deep: flatten it")
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


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise JsonError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number: give a finite number or null")


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)
