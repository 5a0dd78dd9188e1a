"""TOML files and command-line options -> a validated tree of sections, and back.

A section is a pydantic model; its fields have dotted names (`run.steps`). All problems are reported
together, in one `ConfigError` that names field, value, place and remedy.

    file      [learner] / loss = "dapo"    --+
                                             +--> one table --> pydantic --> frozen sections
    words     --learner.loss dapo          --+                     |
              (parsed by the field's type)                         +--> problems, by dotted name
"""

import contextlib
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


def recipes(command: str = "train") -> tuple[str, ...]:
    """Return the names of the package's run files for a command; there may be none."""
    folder = resources.files("longtail") / "recipes" / command
    files = folder.iterdir() if folder.is_dir() else ()
    return tuple(sorted(f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")))


def locate(name: str, command: str = "train") -> Path:
    """Return the run file `name`: an existing path, or else a recipe for the command."""
    path = Path(name)
    if name not in recipes(command) or os.path.isfile(name):
        return path
    return Path(str(resources.files("longtail") / "recipes" / command / f"{name}.toml"))


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
            lines.append(unset if value is None else f"{_key(name)} = {_inline(value)}\n")
        parts.append("".join(lines))
    return "\n".join(parts)


def _inline(value: Any) -> str:
    """Return a value as TOML in one line; entries of tables that are None are left out."""
    if isinstance(value, dict):
        pairs = [
            f"{_key(name)} = {_inline(each)}" for name, each in value.items() if each is not None
        ]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").rstrip("\n")


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


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
        known = "; ".join(f"{each}: {', '.join(recipes(each))}" for each in ("train", "sft"))
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
            detail = error.errors(include_url=False)[0]
            place = f"{name}{_place(detail['loc'])}: " if detail["loc"] else ""
            problem = _nested_problem(known[name], detail) or _expectation(detail)
            draft.problems.append(f"--{name} {text}: {place}{problem}")
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
    schema = adapter.json_schema()
    kinds = [each.get("type") for each in (schema, *schema.get("anyOf", ()))]
    read = _items if "array" in kinds else _structure if "object" in kinds else str
    value = read(text)
    return adapter.dump_python(adapter.validate_python(value), mode="json")


def _items(text: str) -> Any:
    """Split a list written as TOML, ["a", "b"], as JSON, or as a,b."""
    if text.lstrip().startswith("["):
        return _structure(text)
    return [item.strip() for item in text.split(",")] if text else []


def _structure(text: str) -> Any:
    """Read a list or table written as TOML, {a = 1}, or as JSON without null; else the text."""
    with contextlib.suppress(ValueError, RecursionError):
        return tomllib.loads(f"value = {text}")["value"]
    with contextlib.suppress(ValueError, RecursionError, TypeError):
        value = json.loads(text)
        tomli_w.dumps({"value": value})  # null has no form in TOML
        return value
    return text


def _describe(model: type[BaseModel], draft: _Draft, detail: ErrorDetails) -> list[str]:
    """Return one line for each problem that pydantic found at one place."""
    where = [str(part) for part in detail["loc"]]
    name = ".".join(where[:2])
    if detail["type"] == "value_error":  # a rule across fields, which names them
        return str(detail["ctx"]["error"]).splitlines()
    nested = _nested_problem(fields_of(model).get(name), detail, skip=2)
    if detail["type"] == "extra_forbidden" and not nested:
        return [f"{name}: {_unknown(model, name)}"]
    if len(where) == 1:
        return [f"{name} = {_show(detail['input'])}: it must be a section; write [{name}]"]
    origin = f" (from the {_WORDS})" if name in draft.overridden else ""
    element = _place(detail["loc"][2:])
    if nested:
        return [f"{name}{element}{origin}: {nested}"]
    return [f"{name}{element} = {_show(detail['input'])}{origin}: {_expectation(detail)}"]


def _place(parts: Sequence[str | int]) -> str:
    """Return the place of an element in a field: (0, "weight") -> "[0].weight"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)


def _nested_problem(info: FieldInfo | None, detail: ErrorDetails, *, skip: int = 0) -> str | None:
    """Return the message for an unknown or missing key of a table within a field; else None."""
    table = None if info is None else _table_of(info.annotation)
    names = [part for part in detail["loc"][skip:] if isinstance(part, str)]
    for name in names[:-1]:
        inner = None if table is None else table.model_fields.get(name)
        table = None if inner is None else _table_of(inner.annotation)
    if table is None or not names:
        return None
    known = list(table.model_fields)
    if detail["type"] == "missing":
        return "it is missing"
    if detail["type"] != "extra_forbidden":
        return None
    close = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.75)
    nearest = f"the nearest known one is {close[0]}; " if close else ""
    return f"unknown key; {nearest}known are {', '.join(known)}"


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the table model within a field's type: of Task | None, or tuple[Task, ...]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_table_of, get_args(annotation))), None)


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":  # of a tuple
        return "it needs one more value"
    if detail["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return "it must be a table, as {a = 1}"
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
            lines += _described(info.description, 6)
            lines += _keys_of(info, 8)
    return "\n".join(lines)


def _described(text: str | None, indent: int) -> list[str]:
    pad = " " * indent
    words = " ".join((text or "").split())
    return textwrap.wrap(words, 94 - indent, initial_indent=pad, subsequent_indent=pad)


def _keys_of(info: FieldInfo, indent: int) -> list[str]:
    """Return the help text of the keys of a table within a field."""
    lines: list[str] = []
    table = _table_of(info.annotation)
    for name, key in {} if table is None else table.model_fields.items():
        default = "unset" if key.default is None else _show(key.default)
        needed = "needed" if key.is_required() else f"default {default}"
        lines.append(f"{' ' * indent}{name} {_kind(key.annotation)}  ({needed})")
        lines += [*_described(key.description, indent + 4), *_keys_of(key, indent + 6)]
    return lines


def _kind(annotation: Any) -> str:
    """Return the placeholder of a type: TEXT, INT, NUMBER, true|false, choices, or a list."""
    origin, options = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(options[0])
    if origin in (Union, UnionType):
        return _kind(next(option for option in options if option is not type(None)))
    if origin is Literal:
        return "|".join(str(option).lower() for option in options)
    if origin is tuple:
        return f"{_kind(options[0])},..."
    if origin is dict or _table_of(annotation) is not None:
        return "TABLE"
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
