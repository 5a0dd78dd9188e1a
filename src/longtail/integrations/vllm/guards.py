"""Checks before vLLM's functions are replaced, and the replacing itself. No torch, no vLLM.

vLLM's internal functions change between releases. A function is replaced only if its parameters are
known ones; otherwise the engine does not start, with one sentence. A parameter that is new may be a
feature that the replacement would ignore, so it is refused as well.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast, get_args

from longtail.errors import ConfigError, JsonError
from longtail.system.files import parse_json

TESTED = "0.32 or 0.33"
"""vLLM releases whose functions are known."""
_REMEDY = f"use vLLM {TESTED}, or start it without LONGTAIL_VLLM and additional_config.longtail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Known parameters of a function of vLLM.

    Example: Signature(first=("self", "hidden_states"), then=("num_steps",))
    """

    first: tuple[str, ...]
    """Names of the first parameters, in order."""
    then: tuple[str, ...] = ()
    """Names of parameters that may follow, in any order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A function of vLLM and its replacement.

    Example: Patch(owner=rejection_sampler, name="rejection_sample", replacement=sample)
    """

    owner: Any
    """Module or class that holds the function."""
    name: str
    """Attribute of the owner."""
    replacement: Callable[..., Any]

    def __str__(self) -> str:
        module = getattr(self.owner, "__module__", "")
        owner = getattr(self.owner, "__qualname__", self.owner.__name__)
        return ".".join(part for part in (module, owner, self.name) if part)


def check(owner: Any, name: str, signature: Signature) -> Callable[..., Any]:
    """Return the function of `owner`; ConfigError if it is missing or has unknown parameters."""
    place = f"{getattr(owner, '__module__', '')} {getattr(owner, '__name__', owner)}".strip()
    function = getattr(owner, name, None)
    if not callable(function):
        raise ConfigError(f"this vLLM has no {name} in {place}; {_REMEDY}")
    found = tuple(inspect.signature(function).parameters)
    first, rest = found[: len(signature.first)], found[len(signature.first) :]
    unknown = [given for given in rest if given not in signature.then]
    if first != signature.first or unknown:
        fits = first == signature.first
        what = f"has a new parameter {unknown[0]}" if fits else f"takes {', '.join(found)}"
        expected = ", ".join(signature.first)
        raise ConfigError(f"{name} in {place} {what}; known is {expected}; {_REMEDY}")
    return function


def module_of(path: str) -> Any:
    """Return a module of vLLM; ConfigError if this vLLM has none of that name."""
    from importlib import import_module

    try:
        return import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise ConfigError(f"this vLLM has no module {path}; {_REMEDY}") from error


def class_of(path: str, name: str) -> Any:
    """Return a class in a module of vLLM; ConfigError if this vLLM has none of that name."""
    found = getattr(module_of(path), name, None)
    if found is None:
        raise ConfigError(f"this vLLM has no {name} in {path}; {_REMEDY}")
    return found


def replace(patches: Iterable[Patch]) -> Callable[[], None]:
    """Replace all functions and return a function that puts the former ones back."""
    former: list[tuple[Any, str, bool, Any]] = []
    for patch in patches:
        own = patch.name in vars(patch.owner)
        former.append((patch.owner, patch.name, own, vars(patch.owner).get(patch.name)))
        setattr(patch.owner, patch.name, patch.replacement)

    def restore() -> None:
        for owner, name, own, function in reversed(former):
            if own:
                setattr(owner, name, function)
            else:  # it was inherited
                delattr(owner, name)

    return restore


def refuse(config: Any) -> None:
    """Raise ConfigError for a vllm_config whose features cannot be coupled, naming the field."""
    for problem in problems(config):
        raise ConfigError(f"longtail in vLLM: {problem}")


def problems(config: Any) -> Sequence[str]:
    """Return a sentence for each feature of a vllm_config that cannot be coupled."""
    found = []
    if getattr(config, "watermark_config", None) is not None:
        found.append("watermark_config draws tokens by its own noise; remove it")
    if getattr(getattr(config, "model_config", None), "is_diffusion", False):
        found.append("diffusion language models do not draw token by token; remove longtail")
    speculative = getattr(config, "speculative_config", None)
    if speculative is None:
        return found
    method = getattr(speculative, "rejection_sample_method", "standard")
    if method != "standard":
        found.append(
            f"speculative_config.rejection_sample_method={method!r} accepts drafts by another "
            "rule; remove it, longtail accepts a draft where it equals the target's own draw"
        )
    if getattr(speculative, "use_local_argmax_reduction", False):
        found.append(
            "speculative_config.use_local_argmax_reduction never gathers the drafter's logits, "
            "which coupled drafts are drawn from; set it to false"
        )
    return found


def without_draft_cache(config: Any) -> None:
    """Set drafts to ones that need no cache of draft logits: coupled drafts have none."""
    speculative = getattr(config, "speculative_config", None)
    if speculative and getattr(speculative, "draft_sample_method", "greedy") != "greedy":
        speculative.draft_sample_method = "greedy"


VARIABLE = "LONGTAIL_VLLM"
"""Environment variable that switches the plugin on (coupled, match) or off (off)."""
SPECULATION_VARIABLE = "LONGTAIL_VLLM_SPECULATIVE"
"""Environment variable with a speculative_config as JSON, for frameworks that pass none."""
KEY = "longtail"
"""Name of the settings in vLLM's additional_config."""

Drafts = Literal["coupled", "match"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one engine.

    Example: parse_settings({"drafts": "match"}) == VllmSettings(drafts="match")
    """

    drafts: Drafts = "coupled"
    """Noise of the drafts: that of the target (coupled), or drafts as vLLM makes them (match)."""
    block_rows: int | None = None
    """Rows per product in linear layers of a CPU engine; None leaves vLLM's products alone."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as `parse_settings` reads them."""
        return asdict(self)


def parse_settings(value: object, name: str = f"additional_config.{KEY}") -> VllmSettings:
    """Return the settings in a mapping; ConfigError names an unknown or impossible field."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, not {value!r}; {{}} is the default")
    known = [field.name for field in fields(VllmSettings)]
    for key in value:
        if key not in known:
            raise ConfigError(f"{name}.{key} is unknown; the settings are {', '.join(known)}")
    drafts = value.get("drafts", "coupled")
    if drafts not in get_args(Drafts):
        raise ConfigError(f"{name}.drafts must be coupled or match, not {drafts!r}")
    rows = value.get("block_rows")
    if rows is not None and (type(rows) is not int or not 1 <= rows <= 4096):
        raise ConfigError(f"{name}.block_rows must be an integer from 1 to 4096, not {rows!r}")
    return VllmSettings(drafts=cast(Drafts, drafts), block_rows=rows)


def requested(additional_config: object, environment: Mapping[str, str]) -> VllmSettings | None:
    """Return the settings an engine asks for; None if it does not ask.

    `additional_config` goes before the variable, except that LONGTAIL_VLLM=off switches both off.

    Example: requested({}, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings()
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if word not in ("", "off", *get_args(Drafts)):
        raise ConfigError(f"{VARIABLE} must be coupled, match or off, not {word!r}")
    if word == "off":
        return None
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        return parse_settings(additional_config[KEY])
    return VllmSettings(drafts=cast(Drafts, word)) if word else None


def speculation(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the speculative_config in LONGTAIL_VLLM_SPECULATIVE; None without one."""
    text = environment.get(SPECULATION_VARIABLE, "").strip()
    if not text:
        return None
    try:
        value = parse_json(text)
    except JsonError as error:
        raise ConfigError(f"{SPECULATION_VARIABLE} is {error}") from error
    if not isinstance(value, dict) or not value:
        raise ConfigError(
            f"{SPECULATION_VARIABLE} must be a JSON object such as "
            f'{{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}}, not {text}'
        )
    return value
