"""Options of commands: the fields of one class make the command line and are read from it."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic.dataclasses import dataclass

from longtail.config.arguments import WORD, Parser, read
from longtail.errors import ConfigError


@dataclass(kw_only=True)
class Example:
    """One option of every kind."""

    word: Annotated[str, WORD] = Field("w", description="word")
    place: str = Field(description="needed")
    names: tuple[Literal["a", "b"], ...] = Field(("a", "b"), description="names")
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 8), description="sizes")
    share: float = Field(0.5, ge=0, description="share of 100 %")
    kind: Literal["x", "y"] | None = Field(None, description="kind")
    clean: bool = Field(True, description="leave out the cleaning")
    tags: tuple[str, ...] = Field((), description="tags")
    json: bool = Field(False, description="JSON")


def _parser() -> Parser:
    parser = Parser("example", "An example.")
    parser.declare(Example)
    return parser


def example(*words: str) -> Any:
    return read(Example, _parser(), ["--place", "here", *words])


def test_options_are_read_by_their_types_and_have_defaults():
    assert example() == Example(place="here")
    assert example("--tags=a,b", "--tags", '["c,d"]').tags == ("a", "b", "c,d")
    words = ("v", "--names=b", "--sizes=2,9", "--share=0.25", "--kind=y", "--no-clean", "--json")
    assert example(*words) == Example(
        word="v", place="here", names=("b",), sizes=(2, 9), share=0.25, kind="y", clean=False,
        json=True,
    )  # fmt: skip


def test_the_help_shows_choices_and_defaults():
    text = " ".join(_parser().format_help().split())
    for line in (
        "--place str [--names {a,b},...]",
        "WORD word (default: w)",
        "--place str needed --names",
        "--names {a,b},... names (default: a,b)",
        "--sizes int,... sizes (default: 1,8)",
        "--share float share of 100 % (default: 0.5)",
        "--kind {x,y} kind --no-clean leave out the cleaning --tags str,... tags --json JSON",
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
    with pytest.raises(ConfigError, match="arguments are required: --place"):
        read(Example, _parser(), [])
