"""Answers in texts: the part that counts as the final answer, and the last number.

It runs in grader processes, so it imports no torch.
"""

import re
from fractions import Fraction
from typing import SupportsFloat

from longtail.errors import GradingError
from longtail.model.hf.chat import END_THINK, THINK

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_UNSIGNED = r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
_PLAIN = rf"{_UNSIGNED}(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?"
_SIGN = r"(?:(?<![A-Za-z0-9_)\]}])[-+\u2212])?"
_NUMBER = re.compile(
    rf"(?P<sign>{_SIGN})[$\u20ac\u00a3\u00a5]?(?:"
    rf"\\[dt]?frac\{{(?P<latex_over>[-+\u2212]?{_PLAIN})\}}\{{(?P<latex_under>{_PLAIN})\}}"
    rf"|(?<![A-Za-z0-9_])(?P<over>{_PLAIN})(?:/(?P<under>{_PLAIN}))?)"
)


def with_plain_boxes(text: str) -> str:
    r"""Return a text whose `\fbox{...}` and `\boxed {...}` are written `\boxed{...}`."""
    return _BOX.sub(r"\\boxed{", text)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}` or `\fbox{...}`, or None.

    Without any, that is what follows the last `\boxed ` in its line, up to a `$`.

    Example: last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    _, opened, after = with_plain_boxes(text).rpartition(r"\boxed{")
    if not opened:
        _, marked, after = text.rpartition(r"\boxed ")
        return re.split(r"[$\n]", after)[0] if marked else None
    depth = 1
    for brace in re.finditer(r"[{}]", after):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return after[: brace.start()]
    return None


def ends_in_thought(text: str, *, is_opened: bool) -> bool:
    """Return whether a completion ends within its thought; `is_opened`: its prompt opened one.

    Example: ends_in_thought("<think>1 + 1 is 2, so", is_opened=False)
    """
    _, closed, after = text.rpartition(END_THINK)
    return THINK in after or (is_opened and not closed)


def after_thinking(text: str) -> str:
    """Return the text after the last `</think>`; all of it without one."""
    return text.rpartition(END_THINK)[2]


def tagged_answer(text: str) -> str:
    """Return the text after `</think>`, within the last `<answer>...</answer>` if there is one.

    Example: tagged_answer("<think>1+1</think> so <answer> 2 </answer>") == "2"
    """
    text = after_thinking(text)
    before, closed, _ = text.rpartition("</answer>")
    _, opened, inside = before.rpartition("<answer>")
    return (inside if closed and opened else text).strip()


def final_answer(text: str) -> str:
    r"""Narrow a text to its final answer, with runs of white space made one space.

    Each mark that is present narrows the remaining text, in this order: after the last `</think>`,
    within the last `<answer>...</answer>`, the line after the last `####`, within the last
    `\boxed{...}`.

    Example: final_answer("Six sevens.\n#### 42\nDone.") == "42"; final_answer(" 42\n") == "42"
    """
    text = tagged_answer(text)
    _, marked, after = text.rpartition("####")
    if marked:
        text = after.strip().partition("\n")[0]
    boxed = last_boxed(text)
    return " ".join((text if boxed is None else boxed).split())


def last_number(text: str) -> Fraction | None:
    r"""Return the exact value of the last number in a text; None without one.

    A number does not follow an ASCII letter, digit or underscore (the 2 of H2O is none). It may
    have a sign, unless a letter, a digit or a closing bracket stands before it ("10-3" ends with
    3), a currency sign, commas that separate three digits ("1,23" are 1 and 23), a decimal part,
    an exponent of up to three digits, and a denominator without blanks ("3/4", "\frac{3}{4}").
    Per cent signs and units are ignored. More than 4300 digits and a denominator of 0 have no
    value.

    Example: last_number("5 x 2 = 10, so she pays $1,210.50.") == Fraction(2421, 2)
    """
    matches = list(_NUMBER.finditer(text))
    return _value(matches[-1]) if matches else None


def whole_number(text: str) -> Fraction | None:
    """Return the value of a text that is one number, with a per cent sign at most; else None.

    Example: whole_number("$1,000") == 1000; whole_number("18 dollars") is None
    """
    match = _NUMBER.fullmatch(text.strip().removesuffix("%").rstrip())
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    over, under = match["latex_over"] or match["over"], match["latex_under"] or match["under"]
    try:
        value = _parse(over) / _parse(under or "1")
    except (ValueError, ZeroDivisionError):
        return None
    return -value if match["sign"] in ("-", "\u2212") else value


def _parse(number: str) -> Fraction:
    return Fraction(number.replace(",", "").replace("\u2212", "-"))


_LARGEST = 3.4e38
"""Largest float32, the type in which a learner computes."""


def checked_number(value: object, *, source: str) -> float:
    """Return `value` as a finite float, or raise a `GradingError` that names `source`."""
    if value is None:
        raise GradingError(f"{source} returned None: it does not apply to this completion")
    if not isinstance(value, SupportsFloat):
        raise GradingError(f"{source} returned {type(value).__name__} {value!r:.80}, not a number")
    number = float(value)
    if not abs(number) <= _LARGEST:
        raise GradingError(f"{source} returned {number}, not a finite number")
    return number
