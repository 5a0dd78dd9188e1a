"""Patching of vLLM: who asked for it, checks of functions' parameters, and replacement.

vLLM's internal functions change between releases. A function is replaced only if its parameters are
known ones; otherwise the engine does not start, with one sentence. A parameter that is new may be a
feature that the replacement would ignore, so it is refused as well. No torch, no vLLM.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

from longtail.config.arguments import validated
from longtail.config.vllm_plugin import VllmSettings
from longtail.errors import ConfigError, JsonError
from longtail.system.files import parse_json
from longtail.system.machine import vllm_version

_FIRST, _LAST, _COUPLED_V2, _LEARNED_V2 = (0, 23), (0, 33), (0, 29), (0, 32)
"""vLLM releases whose functions are known; the first whose Model Runner V2 they can be in."""
_ADJUSTABLE = ("eagle", "eagle3", "mtp", "dflash", "draft_model", "ngram")
"""Methods of vLLM that take a depth by the step."""
KNOWN, TRAINS = "0.23 to 0.33", "0.31 to 0.33"
"""vLLM releases of the plugin, and those with which `longtail train` generates."""
_REMEDY = f"use vLLM {KNOWN}, or start it without LONGTAIL_VLLM and additional_config.longtail"

VARIABLE = "LONGTAIL_VLLM"
"""Environment variable that switches the plugin on (coupled, learned) or off (off)."""
SPECULATION_VARIABLE = "LONGTAIL_VLLM_SPECULATIVE"
"""Environment variable with a speculative_config as JSON, for frameworks that pass none."""
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
"""Module of vLLM that loads weights into a packed model."""
KEY = "longtail"
"""Name of the settings in vLLM's additional_config."""

_WORDS = {
    "learned": VllmSettings(drafter="learned"),
    "coupled": VllmSettings(),
}
"""Settings that the variable asks for."""


def requested(additional_config: object, environment: Mapping[str, str]) -> VllmSettings | None:
    """Return the settings an engine asks for; None if it does not ask.

    `additional_config` goes before the variable, except that LONGTAIL_VLLM=off switches both off.

    Example: requested({}, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings()
    """
    word = environment.get(VARIABLE, "").strip().lower()
    if word not in ("", "off", *_WORDS):
        raise ConfigError(f"{VARIABLE} must be {', '.join(_WORDS)} or off, not {word!r}")
    if word == "off":
        return None
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        place = f"additional_config.{KEY}"
        return validated(
            VllmSettings, additional_config[KEY], lambda name: f"{place}.{name}".rstrip(".")
        )
    return _WORDS[word] if word else None


def may_run_v2() -> bool:
    """Return whether a drafter can be learned in Model Runner V2 of this vLLM."""
    return _release(vllm_version()) >= _LEARNED_V2


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return () if found is None else tuple(map(int, found.groups()))


def trains_with(version: str) -> bool:
    """Return whether `longtail train` generates with this vLLM."""
    return (0, 31) <= _release(version) <= _LAST


def check_version(*, in_v2: bool = False) -> None:
    """Raise ConfigError for a vLLM whose functions, or those of its V2, are not known."""
    if not _FIRST <= _release(version := vllm_version()) <= _LAST:
        raise ConfigError(f"longtail in vLLM: this is vLLM {version}; {_REMEDY}")
    if in_v2 and _release(version) < _COUPLED_V2:
        raise ConfigError(
            f"longtail in vLLM: drafts cannot be coupled in Model Runner V2 of vLLM {version}; set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def learning(config: Any) -> VllmSettings | None:
    """Return the settings of a vllm_config in which vLLM learns its drafter; None elsewhere."""
    settings = requested(config.additional_config, os.environ)
    return settings if settings is not None and settings.drafter is not None else None


def loses_states(config: Any) -> bool:
    """Return whether a step without drafts would forget the drafts that stood before it.

    So linear attention does in vLLM before 0.32, where such a step begins with an older state.
    """
    return bool(getattr(config.model_config, "is_hybrid", False)) and not may_run_v2()


def chooses_depth(config: Any) -> bool:
    """Return whether each step may draft another number of tokens, and the drafter can.

    Data-parallel engines wait for each other; of pipeline stages each runs some of the requests.
    """
    on_cpu = config.device_config.device_type == "cpu"  # 0.24 copies one number of drafts there
    since = _LEARNED_V2 if config.use_v2_model_runner else (0, 29) if on_cpu else (0, 24)
    takes = config.speculative_config.method in _ADJUSTABLE and _release(vllm_version()) >= since
    parallel = config.parallel_config
    is_one = parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
    return bool(is_one and not loses_states(config) and (takes or learning(config)))


def chains(method: str, depth: int) -> dict[str, Any]:
    """Return a speculative_config."""
    search = {"prompt_lookup_max": 4, "prompt_lookup_min": 2} if method.startswith("ngram") else {}
    return {"method": method, "num_speculative_tokens": depth} | search


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


# ---- functions of vLLM


class Patch(NamedTuple):
    """A function of vLLM and its replacement."""

    owner: Any
    """Module or class that holds the function."""
    name: str
    replacement: Callable[..., Any]

    @staticmethod
    def of(owner: Any, name: str, known: str, new: Callable[..., Any], then: str = "") -> "Patch":
        """Return a patch to `new`, whose first argument is the function that it replaces.

        Raises ConfigError as `check`.
        """
        return Patch(owner, name, around(check(owner, name, known, then), new))


def check(owner: Any, name: str, first: str, then: str = "") -> Callable[..., Any]:
    """Return the function of `owner`; ConfigError if it is missing or has unknown parameters.

    `first` names its first parameters in order, `then` others that may follow, in any order.
    """
    place = f"{getattr(owner, '__module__', '')} {getattr(owner, '__name__', owner)}".strip()
    function = getattr(owner, name, None)
    if not callable(function):
        raise ConfigError(f"this vLLM has no {name} in {place}; {_REMEDY}")
    known, found = first.split(), list(inspect.signature(function).parameters)
    unknown = [given for given in found[len(known) :] if given not in then.split()]
    if found[: len(known)] != known:
        what = f"takes {', '.join(found)}"
    elif unknown:
        what = f"has a new parameter {unknown[0]}"
    else:
        return function
    raise ConfigError(f"{name} in {place} {what}; known is {', '.join(known)}; {_REMEDY}")


def around(stock: Callable[..., Any], new: Callable[..., Any]) -> Callable[..., Any]:
    """Return `new` in the place of `stock`, which is its first argument."""

    @wraps(stock)
    def replacement(*args: Any, **options: Any) -> Any:
        return new(stock, *args, **options)

    return replacement


def reloading() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return vLLM's functions before and after weights are loaded into a packed model.

    Raises ConfigError if this vLLM has none that are known.
    """
    module = module_of(RELOAD)
    return (
        check(module, "initialize_layerwise_reload", "model"),
        check(module, "finalize_layerwise_processing", "model model_config"),
    )


def module_of(path: str, name: str = "") -> Any:
    """Return a module of vLLM, or something in it; ConfigError if this vLLM has it not."""
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise ConfigError(f"this vLLM has no module {path}; {_REMEDY}") from error
    if name and not hasattr(module, name):
        raise ConfigError(f"this vLLM has no {name} in {path}; {_REMEDY}")
    return getattr(module, name) if name else module


def replace(patches: Iterable[Patch]) -> None:
    """Replace all functions."""
    for patch in patches:
        setattr(patch.owner, patch.name, patch.replacement)


def admit_learned(config: Any) -> None:
    """Raise ConfigError, naming the field, for a vllm_config with which none can be learned."""
    model, parallel = config.model_config, config.parallel_config
    if getattr(model, "runner_type", "generate") != "generate":
        problem = f"this model does not generate (runner {model.runner_type}); remove drafter"
    elif parallel.pipeline_parallel_size > 1:
        problem = (
            f"pipeline_parallel_size = {parallel.pipeline_parallel_size}: the last stage has no "
            "embedding, which a learned drafter reads; use tensor_parallel_size"
        )
    elif (adapters := getattr(config, "lora_config", None)) and adapters.max_loras > 1:
        problem = (
            f"max_loras = {adapters.max_loras}: states of several adapters make no one drafter; "
            "set it to 1, or give a trained drafter as speculative_config"
        )
    elif getattr(getattr(config, "quant_config", None), "lm_head_quantized", False):
        problem = (
            "lm_head of this model is quantised, whose weights a learned drafter reads; take a "
            "quantisation that leaves it out, or remove drafter"
        )
    elif loses_states(config) or (
        getattr(model, "is_hybrid", False) and config.device_config.device_type == "cpu"
    ):
        problem = (  # on a CPU its convolution has room for the longest draft only
            "linear attention verifies drafts of one length alone on a CPU, and in vLLM before "
            "0.32; remove drafter"
        )
    else:
        return
    raise ConfigError(f"longtail in vLLM, a learned drafter: {problem}")


def check_room(config: Any) -> None:
    """Raise ConfigError for a GPU that has no room for a learned drafter beside vLLM's share."""
    cache = config.cache_config
    if config.device_config.device_type == "cpu" or getattr(cache, "kv_cache_memory_bytes", None):
        return
    depth = config.speculative_config.num_speculative_tokens
    sums = 4 * (depth + 1) * (2 * config.model_config.get_hidden_size()) ** 2
    memory = module_of("vllm.platforms").current_platform.get_device_total_memory()
    left = memory * (1 - cache.gpu_memory_utilization)
    if sums > left:
        raise ConfigError(
            f"gpu_memory_utilization = {cache.gpu_memory_utilization:g} leaves {left / 1e9:.1f} GB "
            f"to longtail's learned drafter, whose sums take {sums / 1e9:.1f} GB; lower it, or "
            f"additional_config.{KEY}.depth"
        )


def admit(config: Any) -> None:
    """Raise ConfigError for a vllm_config whose features cannot be coupled, naming the field.

    Drafts are set to ones that need no cache of draft logits: coupled drafts have none.
    """
    speculative = getattr(config, "speculative_config", None)
    method = getattr(speculative, "rejection_sample_method", "standard")
    if getattr(config, "watermark_config", None) is not None:
        problem = "watermark_config draws tokens by its own noise; remove it"
    elif getattr(getattr(config, "model_config", None), "is_diffusion", False):
        problem = "diffusion language models do not draw token by token; remove longtail"
    elif method != "standard":
        problem = (
            f"speculative_config.rejection_sample_method={method!r} accepts drafts by another "
            "rule; remove it, longtail accepts a draft where it equals the target's own draw"
        )
    elif getattr(speculative, "use_local_argmax_reduction", False):
        problem = (
            "speculative_config.use_local_argmax_reduction never gathers the drafter's logits, "
            "which coupled drafts are drawn from; set it to false"
        )
    else:
        if getattr(speculative, "draft_sample_method", "greedy") != "greedy":
            speculative.draft_sample_method = "greedy"  # type: ignore[union-attr]
        return
    raise ConfigError(f"longtail in vLLM: {problem}")
