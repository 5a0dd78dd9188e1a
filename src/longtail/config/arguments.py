"""Makes argparse options of the fields of pydantic models and dataclasses.

    n: int = Field(1, ge=1, description="number of completions")
    json: bool = Field(False, description="print JSON")

    --n int     number of completions (default: 1)
    --json      print JSON

A field without a default is a required option; one with the mark WORD is a word without a flag.
The sections of a configuration have dotted names: `--run.steps int`. Needs no torch.
"""

import argparse
import contextlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from longtail.errors import ConfigError, did_you_mean
from longtail.system.files import parse_json

T = TypeVar("T")
WORD = "word"
"""Mark of a field that is a word without a flag: Annotated[str, WORD]."""
OVERRIDES = "overrides"
"""Name of the field that takes the options of a configuration, `--section.key VALUE`."""
_FORMATTER = partial(argparse.RawDescriptionHelpFormatter, width=96, max_help_position=28)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, and whose help has one width on every terminal."""

    def __init__(self, command: str, description: str, **more: Any) -> None:
        """Make the parser of `longtail COMMAND`."""
        super().__init__(
            f"longtail {command}".strip(),
            description=description,
            formatter_class=_FORMATTER,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
            **more,
        )

    def declare(self, kind: type, section: str = "") -> None:
        """Add the fields of a class as `--dashed-name`, those of a section as `--section.key`."""
        group = self.add_argument_group(f"{section} options", kind.__doc__) if section else self
        for name, info in own_fields(kind).items():
            place = f"{section}.{name}" if section else name
            if (inner := section_of(kind, name)) is not None:
                self.declare(inner, place)
            elif name == OVERRIDES:
                self.epilog = info.description
            elif WORD in info.metadata:
                several = "+" if _is_several(info.annotation) else None
                number = several if info.is_required() else "?"
                group.add_argument(place, metavar=name.upper(), nargs=number, help=_help(info))
            elif info.annotation is bool and not section:
                flag = f"no-{name}" if info.default else name
                action = "store_false" if info.default else "store_true"
                group.add_argument(_flag(flag), dest=name, action=action, help=info.description)
            else:
                may_be_unset = section and NoneType in get_args(info.annotation)
                group.add_argument(
                    f"--{place}" if section else _flag(name),
                    dest=place,
                    metavar=_shown(info.annotation),
                    action="append" if _is_several(info.annotation) else "store",
                    type=_text_or_unset if may_be_unset else str,
                    required=info.is_required(),
                    help=_help(info),
                )

    def values(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the values that were given, by name; those of a section are in a table."""
        found: dict[str, Any] = {}
        for name, given in vars(self.parse_args(words)).items():
            *sections, key = name.split(".")
            table = found
            for section in sections:
                table = table.setdefault(section, {})
            table[key] = _decoded(given)
        return found

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with a suggestion for each unknown option."""
        said, unrecognized, rest = message.partition("unrecognized arguments")
        known = self._option_string_actions
        option = r"(--[\w.-]+)\S*"
        rest = re.sub(option, lambda found: found[0] + did_you_mean(found[1], known), rest)
        raise ConfigError(f"{said}{unrecognized}{rest}; see {self.prog} --help")


def own_fields(kind: Any) -> Mapping[str, FieldInfo]:
    """Return the fields of a pydantic model or dataclass, without those of its sections."""
    return dict(kind.__pydantic_fields__)


def section_of(kind: type, name: str) -> type[BaseModel] | None:
    """Return the model of a field that is a section, which may be unset; None for other fields."""
    info = own_fields(kind).get(name)
    hint = None if info is None else info.annotation
    kinds = [each for each in (hint, *get_args(hint)) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


def _flag(name: str) -> str:
    return f"--{name}".replace("_", "-")


def _shown(hint: Any) -> str:
    """Return a type as the help shows it: int, {auto,own}, str,..."""
    parts = [each for each in get_args(hint) if each is not NoneType]
    if get_origin(hint) is Literal:
        return f"{{{','.join(map(_written, parts))}}}"
    if get_origin(hint) is Annotated:
        return _shown(parts[0])
    if get_origin(hint) is dict:
        return "table"
    return ",".join(map(_shown, parts)) or ("..." if hint is ... else str(hint.__name__))


def _is_several(hint: Any) -> bool:
    """Return whether a type has several values: an option of it may be repeated."""
    return get_origin(hint) in (tuple, dict) or any(map(_is_several, get_args(hint)))


def _written(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _help(info: FieldInfo) -> str:
    """Return the text of a field with its default, unless the text says it."""
    text = (info.description or "").replace("%", "%%")
    if info.is_required() or info.default in (None, (), "") or "(default" in text:
        return text
    return f"{text} (default: {_written(info.default)})"


def _text_or_unset(text: str) -> str | None:
    return None if text in ("none", "") else text


def _decoded(given: Any) -> Any:
    """Return the value of an option. What comes as a list of texts is that of a list or table.

    Example: _decoded("a,b") == "a,b", _decoded(["a,b"]) == _decoded(['["a", "b"]']) == ["a", "b"]
    """
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for text in given:
        value = None if text is None else _structure(text)
        if (value is None or isinstance(value, dict)) and len(given) == 1:
            return value
        found += value if isinstance(value, list) else [value]
    return found


def _structure(text: str) -> Any:
    """Read a list or table written as TOML or JSON, or items with commas between them."""
    if text.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError, RecursionError):
            return tomllib.loads(f"value = {text}")["value"]
        with contextlib.suppress(ValueError, RecursionError):
            return parse_json(text, allow_nan=True)
    return [item.strip() for item in text.split(",")] if text else []


def read(kind: type[T], parser: Parser, words: Sequence[str]) -> T:
    """Return the options; ConfigError names each wrong one, its value and what it must be."""
    overrides: dict[str, Any] = {}
    if OVERRIDES in own_fields(kind):
        words, overrides[OVERRIDES] = split_overrides(words)
    return validated(kind, parser.values(words) | overrides, _flag)


def validated(kind: type[T], values: object, name_of: Callable[[str], str]) -> T:
    """Return a model or dataclass of these values; ConfigError names what is wrong with each.

    `name_of` returns the name of a field in the message, from its dotted place in the model.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    known = f"; known are {', '.join(own_fields(kind))}"
    problems = (
        describe(name_of(place_of(each["loc"])), each)
        + (known if each["type"] == "extra_forbidden" else "")
        for each in details
    )
    raise ConfigError("\n  ".join(problems))


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


def describe(name: str, detail: ErrorDetails) -> str:
    """Return the message for a wrong value: its name, itself and what it must be."""
    if detail["type"] == "value_error":  # a rule across fields, which names them
        return str(detail["ctx"]["error"])
    if detail["type"] == "extra_forbidden":
        return f"{name}: it is unknown"
    is_word = name.startswith("--") and isinstance(detail["input"], str)
    value = detail["input"] if is_word else json.dumps(detail["input"], default=str)
    value = value if len(value) <= 60 else f"{value[:57]}..."
    message = detail["msg"].partition(", unable to")[0].removeprefix("Input should be ")
    return f"{name} = {value}: it must be {message[0].lower()}{message[1:]}"


def place_of(parts: Sequence[str | int]) -> str:
    """Return the name of an element: ("data", "tasks", 0, "name") -> "data.tasks[0].name"."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in parts)[1:]
