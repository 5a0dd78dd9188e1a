"""Options of commands: one dataclass makes the command line and reads it back."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from longtail.config.options import Arguments, Json, Option, arguments_of, read
from longtail.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Example:
    """One option of every kind."""

    place: Annotated[str, Option("required")]
    names: Annotated[tuple[str, ...], Option("names", choices=("a", "b"))] = ("a", "b")
    sizes: Annotated[tuple[int, ...], Option("sizes", low=1, high=9)] = (1, 8)
    share: Annotated[float, Option("share", low=0)] = 0.5
    kind: Annotated[Literal["x", "y"] | None, Option("kind")] = None
    clean: Annotated[bool, Option("leave out the cleaning")] = True
    tags: Annotated[tuple[str, ...], Option("tags")] = ()
    json: Json = False


def _arguments() -> Arguments:
    return arguments_of("example", "An example.", Example)


def example(*words: str) -> Any:
    return read(Example, _arguments(), ["--place", "here", *words])


def test_options_are_read_by_their_types_and_have_defaults():
    assert example() == Example(place="here")
    assert example("--tags=a,b", "--tags", '["c,d"]').tags == ("a", "b", "c,d")
    words = ("--names=b", "--sizes=2,9", "--share=0.25", "--kind=y", "--no-clean", "--json")
    assert example(*words) == Example(
        place="here", names=("b",), sizes=(2, 9), share=0.25, kind="y", clean=False, json=True
    )


def test_the_help_shows_choices_and_defaults():
    text = " ".join(_arguments().parser.format_help().split())
    for line in (
        "--place str required (required)",
        "--names {a,b},... names (default: a,b)",
        "--sizes int,... sizes (default: 1,8)",
        "--share float share (default: 0.5)",
        "--kind {x,y} kind --no-clean leave out the cleaning",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--names", "a,c"), r"--names\[1\] = c: it must be 'a' or 'b'"),
        (("--sizes", "1,zero"), r"--sizes\[1\] = zero: it must be a valid integer"),
        (("--sizes", "0"), r"--sizes\[0\] = 0: it must be greater than or equal to 1"),
        (("--share", "-1"), "--share = -1: it must be greater than or equal to 0"),
        (("--size", "1"), r"--size \(did you mean --sizes\?\)"),
    ],
)
def test_a_wrong_value_is_refused_with_option_value_and_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        example(*words)
    with pytest.raises(ConfigError, match="--place: it is missing"):
        read(Example, _arguments(), [])
