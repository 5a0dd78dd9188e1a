"""Options of the command line: models and dataclasses -> argparse, through pydantic-settings.

    n: Annotated[int, Option("number of completions", low=1, high=4096)] = 1
    json: Annotated[bool, Option("print JSON")] = False

    --n int     number of completions (default: 1)
    --json      print JSON

A field without a default is a required option; one with `positional` is a word without a flag. The
sections of a configuration have dotted names: `--run.steps int`. Needs no torch.
"""

import argparse
import contextlib
import json
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliPositionalArg, CliSettingsSource

from longtail.errors import ConfigError, did_you_mean
from longtail.system.files import parse_json

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
OVERRIDES = "overrides"
"""Name of the field that takes the options of a configuration, `--section.key VALUE`."""
_WIDTH = 96
_POSITIONAL: Any = CliPositionalArg
_ONE_OF: Any = Literal


@dataclass(frozen=True, slots=True)
class Option:
    """Help and limits of one option.

    Example: Option("requests running at a time", low=1, high=256)
    """

    help: str
    metavar: str | None = None
    """Name of the value in the help; the default is its type."""
    choices: tuple[str, ...] = ()
    low: int | None = None
    high: int | None = None
    positional: bool = False
    """Whether the value is a word without a flag."""


Json = Annotated[bool, Option("print the JSON line only")]


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, and whose help has one width on every terminal."""

    def __init__(self, command: str, description: str, **more: Any) -> None:
        """Make the parser of `longtail COMMAND`."""
        super().__init__(
            f"longtail {command}".strip(),
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            **more,
        )

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError, with a suggestion for each unknown option."""
        said, unrecognized, rest = message.partition("unrecognized arguments")
        known = self._option_string_actions
        option = r"(--[\w.-]+)\S*"
        rest = re.sub(option, lambda found: found[0] + did_you_mean(found[1], known), rest)
        raise ConfigError(f"{said}{unrecognized}{rest}; see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH, max_help_position=28)


class Arguments:
    """The fields of a model as arguments of a parser."""

    def __init__(
        self,
        parser: Parser,
        model: type[BaseModel],
        *,
        has_sections: bool,
        metavars: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Declare them: those of sections are `--section.key VALUE`, others `--dashed-name`."""
        self.parser, self.model, self._has_sections = parser, model, has_sections
        CliSettingsSource(
            _model(model.__name__, __base__=(BaseSettings, model)),
            root_parser=parser,
            add_argument_method=partial(_add_argument, metavars),
            cli_parse_none_str="none",
            cli_hide_none_type=True,
            cli_avoid_json=True,
            cli_kebab_case=not has_sections,
            cli_implicit_flags=False if has_sections else "toggle",
            cli_use_class_docs_for_groups=has_sections,
        )

    def parse(self, words: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
        """Return all arguments, and the values of the fields that were given, by section."""
        parsed = self.parser.parse_args(words)
        values: dict[str, Any] = {}
        for name, text in vars(parsed).items():
            *sections, key = name.split(".")
            if self._has_sections and sections:
                table, place = self.model, values
                for section in sections:
                    table, inner = section_of(table, section) or table, place.get(section)
                    place[section] = inner if isinstance(inner, dict) else {}
                    place = place[section]
                optional = NoneType in get_args(table.model_fields[key].annotation)
                is_unset = optional and text in ("none", "", ["none"], [""])
                place[key] = None if is_unset else _decoded(text)
            elif not self._has_sections and text is not None:
                values[name] = _decoded(text)
        return parsed, values


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the model of a field that is a section, which may be unset; None for other fields."""
    kind = model.model_fields[name].annotation if name in model.model_fields else None
    kinds = [each for each in (kind, *get_args(kind)) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


def _decoded(given: Any) -> Any:
    """Return the value of an option. What comes as a list of texts is that of a list or table.

    Example: _decoded("a,b") == "a,b", _decoded(["a,b"]) == _decoded(['["a", "b"]']) == ["a", "b"]
    """
    if not isinstance(given, list):
        return given
    found: list[Any] = []
    for text in given:
        value = _structure(text)
        if isinstance(value, dict) and len(given) == 1:
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


def _add_argument(
    metavars: Mapping[str, str], place: Any, *names: str, **more: Any
) -> argparse.Action:
    """Declare an argument; `--n` has two dashes, too, and no default is shown twice."""
    if more.get("metavar", "").startswith("tuple["):  # "tuple[int,...]" -> "int,..."
        more["metavar"] = more["metavar"].removeprefix("tuple[").removesuffix("]")
        more["help"] = _without_brackets(more["help"])
    text, _, default = more.get("help", "").rpartition(" (default: ")
    if default == "none)" or "(default" in text or (default and "metavar" not in more):
        more["help"] = text
    for key in {"metavar", "help"} & more.keys():  # true and false, as TOML writes them
        more[key] = re.sub(r"\b(True|False)\b", lambda found: found[0].lower(), more[key])
    if metavar := metavars.get(names[-1].lstrip("-")):
        more["metavar"] = metavar
    names = tuple(f"-{name}" if len(name) == 2 else name for name in names)
    return argparse.ArgumentParser.add_argument(place, *names, **more)


def _without_brackets(text: str) -> str:
    """Write the default of a list as it is given: "(default: ('a', 'b'))" -> "(default: a,b)"."""
    text, found, default = text.partition(" (default: (")
    items = default.removesuffix("))").replace("'", "").split(", ")
    return f"{text} (default: {','.join(items).rstrip(',')})" if found and items != [""] else text


def _model(name: str, /, **fields_of: Any) -> Any:
    """Make a model; fields may have names of BaseModel's old methods, such as `json`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return create_model(name, **fields_of)


def arguments_of(command: str, summary: str, kind: type) -> Arguments:
    """Return the arguments of a command whose options are a dataclass."""
    declared: dict[str, Any] = {}
    metavars: dict[str, str] = {}
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        hint, option = get_args(hints[each.name])
        if each.name == OVERRIDES:
            summary = f"{summary}\n{option.help}"
            continue
        hint = _limited(hint, option)
        default = ... if each.default is MISSING else each.default
        info = Field(default, description=option.help)
        if option.metavar:
            metavars[each.name.replace("_", "-")] = option.metavar
        declared[each.name] = (_POSITIONAL[hint] if option.positional else hint, info)
    model = _model(kind.__name__, **declared)
    return Arguments(Parser(command, summary), model, has_sections=False, metavars=metavars)


def _limited(hint: Any, option: Option) -> Any:
    """Return a type with the limits of an option; those of a list are of its elements."""
    if get_origin(hint) is tuple:
        return tuple[_limited(get_args(hint)[0], option), ...]  # type: ignore[misc]
    if option.choices:
        return _ONE_OF[option.choices]
    if option.low is not None or option.high is not None:
        return Annotated[hint, Field(ge=option.low, le=option.high)]
    return hint


def read(kind: type[T], arguments: Arguments, words: Sequence[str]) -> T:
    """Return the options; ConfigError names each wrong one, its value and what it must be."""
    values: dict[str, Any] = {}
    if OVERRIDES in get_type_hints(kind):
        words, values[OVERRIDES] = split_overrides(words)
    _, given = arguments.parse(words)
    checked = validated(arguments.model, given, lambda place: f"--{place}".replace("_", "-"))
    values |= {name: getattr(checked, name) for name in checked.model_fields_set}
    return kind(**values)


def validated(model: type[Model], values: object, name_of: Callable[[str], str]) -> Model:
    """Return a model of these values; ConfigError names each wrong one and what it must be.

    `name_of` returns the name of a field in the message, from its dotted place in the model.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    known = f"; known are {', '.join(model.model_fields)}"
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
    if detail["type"] == "missing":
        return f"{name}: it is missing; give it"
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
