"""TOML files and command-line options -> a validated tree of sections, and back.

A section is a pydantic model; its fields have dotted names (`run.steps`). All problems are reported
together, in one `ConfigError` that names field, value, place and remedy.

    file      [learner] / loss = "dapo"    --+
                                             +--> one table --> pydantic --> frozen sections
    words     --learner.loss dapo          --+                     |
              (parsed by the field's type)                         +--> problems, by dotted name
"""

import difflib
import inspect
import json
import os
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from longtail.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)
_WORDS = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """Values before validation, and the problems found so far."""

    values: dict[str, Any]
    overridden: set[str] = field(default_factory=set)
    """Dotted names of the values from the command line."""
    problems: list[str] = field(default_factory=list)


def recipes() -> tuple[str, ...]:
    """Return the names of the run files in the package."""
    files = (resources.files("longtail") / "recipes").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def locate(name: str) -> Path:
    """Return the run file `name`: an existing path, or else a recipe of the package."""
    path = Path(name)
    if name not in recipes() or os.path.exists(name):
        return path
    return Path(str(resources.files("longtail") / "recipes" / f"{name}.toml"))


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of all sections by dotted name."""
    return {
        f"{section}.{name}": info
        for section, model_type in _sections(model)
        for name, info in model_type.model_fields.items()
    }


def resolve(model: type[Model], path: Path | None, words: Sequence[str]) -> Model:
    """Return the values of a run file, overridden by `words`, validated, defaults filled in.

    `words` are `--a.b value` or `--a.b=value`. Raises ConfigError with every problem found.
    """
    draft = _Draft(values=_read(path) if path else {})
    _overlay(model, draft, words)
    try:
        config = model.model_validate_json(json.dumps(draft.values, default=str), strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            draft.problems.extend(_describe(model, draft, detail))
    if draft.problems:
        raise ConfigError(_report(path, draft.problems))
    return config


def render(config: BaseModel) -> str:
    """Return the whole configuration as TOML; `resolve` of it gives an equal configuration."""
    parts = []
    for section, _ in _sections(type(config)):
        lines = [f"[{section}]\n"]
        for name, value in config.model_dump(mode="json")[section].items():
            unset = f"# {name} is unset\n"
            lines.append(unset if value is None else tomli_w.dumps({name: value}))
        parts.append("".join(lines))
    return "\n".join(parts)


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, info in model.model_fields.items():
        section = info.annotation
        assert isinstance(section, type), f"{name} is not a section"
        assert issubclass(section, BaseModel), f"{name} is not a section"
        yield name, section


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(recipes())
        raise ConfigError(
            f"{path}: no such file; give the path of a TOML run file, or a recipe's name ({known})"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file (byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # tomllib and its integers
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _overlay(model: type[BaseModel], draft: _Draft, words: Sequence[str]) -> None:
    """Parse each word as the type of its field, and replace the file's value."""
    known = fields_of(model)
    for name, text in _pairs(words, draft.problems):
        if name not in known:
            draft.problems.append(f"--{name}: {_unknown(model, name)}")
            continue
        try:
            value = _parse(known[name], text)
        except ValidationError as error:
            expected = _expectation(error.errors(include_url=False)[0])
            draft.problems.append(f"--{name} {text}: {expected}")
            continue
        section, _, key = name.partition(".")
        table = draft.values.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
            draft.overridden.add(name)


def _pairs(words: Sequence[str], problems: list[str]) -> Iterator[tuple[str, str]]:
    """Split `--a.b value` and `--a.b=value` into name and value; a bare word is a problem."""
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            problems.append(f"{word}: not an option; write --section.key value")
        elif equals:
            yield name, value
        elif queue and not queue[0].startswith("--"):
            yield name, queue.pop(0)
        else:
            problems.append(f"--{name}: a value is missing; write --{name} VALUE")


def _parse(info: FieldInfo, text: str) -> Any:
    """Read one command-line value as the field's type; raises ValidationError."""
    if type(None) in get_args(info.annotation) and text.lower() in ("none", ""):
        return None
    # Parsing is lax ("5" is a number, "true" a boolean); the result is validated strictly later.
    adapter: TypeAdapter[Any] = TypeAdapter(info.rebuild_annotation())
    value = _items(text) if adapter.json_schema().get("type") == "array" else text
    return adapter.dump_python(adapter.validate_python(value), mode="json")


def _items(text: str) -> Any:
    """Split a list written as TOML, ["a", "b"], or as a,b."""
    if text.lstrip().startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except (ValueError, RecursionError):
            return text
    return [item.strip() for item in text.split(",")] if text else []


def _describe(model: type[BaseModel], draft: _Draft, detail: ErrorDetails) -> list[str]:
    """Return one line for each problem that pydantic found at one place."""
    where = [str(part) for part in detail["loc"]]
    name = ".".join(where[:2])
    if detail["type"] == "value_error":  # a rule across fields, which names them
        return str(detail["ctx"]["error"]).splitlines()
    if detail["type"] == "extra_forbidden":
        return [f"{name}: {_unknown(model, name)}"]
    if len(where) == 1:
        return [f"{name} = {_show(detail['input'])}: it must be a section; write [{name}]"]
    element = "".join(f"[{part}]" for part in where[2:])
    origin = f" (from the {_WORDS})" if name in draft.overridden else ""
    return [f"{name}{element} = {_show(detail['input'])}{origin}: {_expectation(detail)}"]


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":  # of a tuple
        return "it needs one more value"
    message = detail["msg"].partition(", unable to")[0]
    if message.startswith("Input should be "):
        return f"it must be {message.removeprefix('Input should be ')}"
    return f"it is refused: {message[0].lower()}{message[1:]}"


def _unknown(model: type[BaseModel], name: str) -> str:
    """Return the message for an unknown key: same key elsewhere, then similar spelling."""
    known = list(fields_of(model))
    sections = [section for section, _ in _sections(model)]
    section, _, key = name.rpartition(".")
    namesakes = [k for k in known if k.partition(".")[2] == key]
    spellings = known if section in sections else [*known, *sections]
    close = difflib.get_close_matches(name, spellings, n=1, cutoff=0.75)
    similar = difflib.get_close_matches(key, [k.partition(".")[2] for k in known], n=1, cutoff=0.75)
    elsewhere = [k for k in known if k.partition(".")[2] in similar]
    if nearest := (namesakes or close or elsewhere):
        return f"unknown key; the nearest known one is {nearest[0]}"
    if section in sections:
        keys = ", ".join(k.partition(".")[2] for k in known if k.startswith(f"{section}."))
        return f"unknown key; [{section}] has {keys}"
    return f"unknown key; the sections are {', '.join(sections)}"


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _report(path: Path | None, problems: Sequence[str]) -> str:
    place = str(path) if path else _WORDS
    if len(problems) == 1:
        return f"{place}: {problems[0]}"
    return "\n  ".join([f"{place}: {len(problems)} problems", *problems])


def describe(model: type[BaseModel]) -> str:
    """Return the help text of every field: name, kind, default, docstring."""
    lines = ["configuration; in a TOML file: key = VALUE under [section]"]
    for section, section_type in _sections(model):
        lines += ["", f"[{section}]  {inspect.cleandoc(section_type.__doc__ or '')}"]
        for name, info in section_type.model_fields.items():
            default = "unset" if info.default is None else _show(info.default)
            lines.append(f"  --{section}.{name} {_kind(info.annotation)}  (default {default})")
            text = " ".join((info.description or "").split())
            lines += textwrap.wrap(text, 88, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _kind(annotation: Any) -> str:
    """Return the placeholder of a type: TEXT, INT, NUMBER, true|false, choices, or a list."""
    origin, options = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(options[0])
    if origin in (Union, UnionType):
        return _kind(next(option for option in options if option is not type(None)))
    if origin is Literal:
        return "|".join(options)
    if origin is tuple:
        return f"{_kind(options[0])},..."
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT"}[annotation]


def differences(old: str, new: str) -> dict[str, tuple[Any, Any]]:
    """Return the changed fields of two TOML texts: dotted name -> (old, new), None if unset."""
    before, after = (_flatten(tomllib.loads(text)) for text in (old, new))
    names = [*before, *(name for name in after if name not in before)]
    pairs = {name: (before.get(name), after.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def lookup(text: str, name: str) -> Any:
    """Return one field of a TOML text; None if it is unset or absent."""
    return _flatten(tomllib.loads(text)).get(name)


def _flatten(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, keys in table.items()
        for key, value in (keys.items() if isinstance(keys, Mapping) else ())
    }
