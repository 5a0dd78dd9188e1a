"""Command line options, declared once: a frozen dataclass with an `Option` on each field.

    models: Annotated[tuple[str, ...], Option("models", choices=NAMES, quick=("small",))] = NAMES
    repeats: Annotated[int, Option("turns of each contestant", low=1)] = 3
    generate: Annotated[bool, Option("leave out transformers")] = True

    --models A,B    models: small, 100m (default: all)
    --repeats N     turns of each contestant (default 3)
    --no-generate   leave out transformers

A field without a default is a required option; one with `positional` is a word without a flag.
A field `overrides` takes what the command line says about a configuration, `--section.key VALUE`.
Needs no torch.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from longtail.errors import ConfigError

T = TypeVar("T")
_EXAMPLES = {int: "1,8", float: "0,1"}
OVERRIDES = "overrides"
"""Name of the field that takes the words of a configuration."""


@dataclass(frozen=True, slots=True)
class Option:
    """Help and limits of one option.

    Example: Option("requests running at a time", low=1, high=256, quick=(1, 8))
    """

    help: str
    metavar: str | None = None
    """Name of the value in the help; the default follows from the type."""
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    quick: Any = None
    """Default with `--quick`; None keeps the usual one."""
    default: str | None = None
    """Text of the help in place of the default."""
    group: str | None = None
    """Name shared by options that exclude each other."""
    positional: bool = False
    """Whether the value is a word without a flag."""


Json = Annotated[bool, Option("print the JSON line only")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """One field as an argument of the command line."""

    name: str
    option: Option
    value_type: type
    is_list: bool
    choices: tuple[str, ...]
    default: Any

    @property
    def flag(self) -> str:
        return ("--no-" if self.default is True else "--") + self.name.replace("_", "-")

    def add_to(self, parser: Any, help_text: str) -> None:
        """Declare the argument; its value is None unless it is given."""
        if self.option.positional:
            parser.add_argument(self.name, nargs="?", metavar=self.option.metavar, help=help_text)
            return
        if self.value_type is bool:
            parser.add_argument(
                self.flag, dest=self.name, action="store_const", const=not self.default,
                help=help_text,
            )  # fmt: skip
            return
        scalar_choices = self.choices if not self.is_list else ()
        metavar = self.option.metavar or {int: "N", float: "X"}.get(self.value_type, "A")
        if self.is_list and not self.option.metavar:
            metavar = "A,B" if self.value_type is str else f"{metavar},{metavar}"
        parser.add_argument(
            self.flag,
            type=str if self.is_list else self.value_type,
            choices=scalar_choices or None,
            metavar=None if scalar_choices else metavar,
            required=self.default is MISSING,
            help=help_text,
        )

    def help_text(self) -> str:
        """Return the help with the default behind it."""
        text = self.option.help
        if self.is_list and self.choices:
            text = f"{text}: {', '.join(self.choices)}"
        default = self.option.default
        if default is None and self.value_type is not bool and self.default not in (None, MISSING):
            default = f"default {shown(self.default)}"
            if self.is_list and self.default == self.choices:
                default = "default: all"
        return f"{text} ({default})".strip() if default else text

    def parse(self, given: Any) -> Any:
        """Return the value of a given option; ConfigError if it is out of range."""
        if not self.is_list:
            if self.value_type in _EXAMPLES and not self._is_in_range(given):
                raise ConfigError(f"{self.flag} = {given}: it must be {self._range()}")
            return given
        parts = given.split(",")
        if self.value_type is str:
            for part in parts:
                if self.choices and part not in self.choices:
                    raise ConfigError(
                        f"{self.flag}: {part!r} is not one of {', '.join(self.choices)}"
                    )
            return tuple(parts)
        try:
            values = tuple(self.value_type(part) for part in parts)
        except ValueError:
            values = ()
        if not values or not all(map(self._is_in_range, values)):
            example = _EXAMPLES[self.value_type]
            raise ConfigError(
                f"{self.flag} = {given!r}: it must be numbers {self._range()}, as in {example}"
            )
        return values

    def _is_in_range(self, value: int | float) -> bool:
        low, high = self.option.low, self.option.high
        return (low is None or value >= low) and (high is None or value <= high)

    def _range(self) -> str:
        low, high = self.option.low, self.option.high
        return f"at least {low}" if high is None else f"from {low} to {high}"


def add_arguments(parser: argparse.ArgumentParser, kind: type) -> None:
    """Declare every field of an options class."""
    groups: dict[str, Any] = {}
    arguments = list(_arguments(kind))
    quick = [f"{each.flag} {shown(each.option.quick)}" for each in arguments if each.option.quick]
    for each in arguments:
        text = " ".join([each.help_text(), *(quick if each.name == "quick" else [])])
        group = each.option.group
        if group is not None and group not in groups:
            groups[group] = parser.add_mutually_exclusive_group()
        if each.name == OVERRIDES:
            parser.set_defaults(overrides=())
            parser.add_argument_group("configuration", each.option.help)
        else:
            each.add_to(parser if group is None else groups[group], text)


def split_overrides(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split words into options of a command and those of a configuration, with their values.

    Example: ["--steps", "2", "--run.seed", "1"] -> (["--steps", "2"], ("--run.seed", "1"))
    """
    own: list[str] = []
    overrides: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, _ = word.partition("=")
        if not (word.startswith("--") and "." in name):
            own.append(word)
            continue
        overrides.append(word)
        if not equals and queue and not queue[0].startswith("--"):
            overrides.append(queue.pop(0))
    return own, tuple(overrides)


def read(kind: type[T], args: argparse.Namespace) -> T:
    """Return the options; ConfigError names the wrong one, its value and what it must be."""
    values: dict[str, Any] = {}
    for each in _arguments(kind):
        given = getattr(args, each.name)
        if each.name == OVERRIDES:
            values[each.name] = given
        elif given is not None:
            values[each.name] = each.parse(given)
        elif each.option.quick is not None and args.quick:
            values[each.name] = each.option.quick
    return kind(**values)


def shown(value: Any) -> str:
    """Render a value as it is given. Example: shown((1, 8)) == "1,8"."""
    if isinstance(value, tuple):
        return ",".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _arguments(kind: Any) -> Iterator[_Argument]:
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        hint, option = hints[field.name].__origin__, hints[field.name].__metadata__[0]
        parts = get_args(hint) or (hint,)
        literal = isinstance(parts[0], str)
        yield _Argument(
            name=field.name,
            option=option,
            value_type=str if literal else parts[0],
            is_list=get_origin(hint) is tuple,
            choices=parts if literal else option.choices,
            default=field.default,
        )
