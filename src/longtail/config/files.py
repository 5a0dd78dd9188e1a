"""TOML files and command-line options -> a validated tree of sections, and back.

A section is a pydantic model; its fields have dotted names (`run.steps`). All problems are reported
together, in one `ConfigError` that names field, value, place and remedy.

    file      [learner] / loss = "dapo"    --+
                                             +--> one table --> pydantic --> frozen sections
    options   --learner.loss dapo          --+
"""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from longtail.config.arguments import Parser, describe, place_of, section_of
from longtail.errors import ConfigError, did_you_mean
from longtail.system.files import read_file

Model = TypeVar("Model", bound=BaseModel)


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
    found: dict[str, FieldInfo] = {}
    for name, info in model.model_fields.items():
        section = section_of(model, name)
        if section is None or info.default is None:
            found[name] = info
        inside = {} if section is None else fields_of(section)
        found |= {f"{name}.{key}": each for key, each in inside.items()}
    return found


def resolve(model: type[Model], path: Path | None, words: Sequence[str]) -> Model:
    """Return the values of a run file, overridden by `words`, validated, defaults filled in.

    `words` are `--a.b value` or `--a.b=value`. Raises ConfigError with every problem found.
    """
    return merged(model, path, _parser(model).values(words))


@cache
def _parser(model: type[BaseModel]) -> Parser:
    parser = Parser("train", "")
    parser.declare(model)
    return parser


def merged(model: type[Model], path: Path | None, given: Mapping[str, Any]) -> Model:
    """Return the values of a run file, overridden by those given on the command line."""
    values = _read(path) if path else {}
    _update(model, values, given)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
    problems = [line for detail in details for line in _problem(model, given, detail).splitlines()]
    place = str(path or "command line")
    if len(problems) == 1:
        raise ConfigError(f"{place}: {problems[0]}")
    raise ConfigError("\n  ".join([f"{place}: {len(problems)} problems", *problems]))


def _update(model: type[BaseModel], values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Replace the values of a section, and of sections inside it, by those given."""
    for name, value in given.items():
        inner = section_of(model, name)
        if inner is None or not isinstance(value, Mapping):
            values[name] = value
        elif isinstance(values.setdefault(name, {}), dict):
            _update(inner, values[name], value)


def render(config: BaseModel) -> str:
    """Return the configuration as TOML without unset fields; `resolve` gives an equal one."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_file(path).decode())
    except FileNotFoundError:
        known = "; ".join(f"{each}: {', '.join(recipes(each))}" for each in ("train", "sft"))
        raise ConfigError(
            f"{path}: no such file; give the path of a TOML run file, or a recipe's name ({known})"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:  # tomllib and its integers
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


def _problem(model: type[BaseModel], given: Mapping[str, Any], detail: ErrorDetails) -> str:
    """Return the message for a problem that pydantic found."""
    section, key = (*detail["loc"], "", "")[:2]
    name = place_of(detail["loc"])
    if len(detail["loc"]) > 1 and key in given.get(str(section), {}):
        name = f"--{name}"
    if detail["type"] == "extra_forbidden":
        return f"{name}: {_unknown(model, place_of(detail['loc']))}"
    if len(detail["loc"]) == 1:
        value = json.dumps(detail["input"], default=str)
        return f"{name} = {value}: it must be a section; write [{name}]"
    return describe(name, detail)


def _unknown(model: type[BaseModel], name: str) -> str:
    """Return the message for an unknown name: one that is like it, or all that are possible."""
    known, sections = list(fields_of(model)), list(model.model_fields)
    section, _, _ = name.partition(".")
    if hint := did_you_mean(name, known if section in sections else [*known, *sections]):
        return f"unknown key{hint}"
    if section in sections:
        keys = ", ".join(each.partition(".")[2] for each in known if each.startswith(f"{section}."))
        return f"unknown key; [{section}] has {keys}"
    return f"unknown key; the sections are {', '.join(sections)}"


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
