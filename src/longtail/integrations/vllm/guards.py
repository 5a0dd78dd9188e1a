"""Checks before vLLM's functions are replaced, and the replacing itself. No torch, no vLLM.

vLLM's internal functions change between releases. A function is replaced only if its parameters are
known ones; otherwise the engine does not start, with one sentence. A parameter that is new may be a
feature that the replacement would ignore, so it is refused as well.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longtail.errors import ConfigError

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
