"""config.json of the supported families: parsed to a `ModelConfig` and written from one.

The fields of both transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) are read.
Absent fields have the defaults of the families' own configuration classes. Pure functions;
`model.hf.model` reads and writes files.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, final, get_args

import torch

from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.rope import Rope, RopeConfig, RopeScaling
from longtail.model.transformer import Family, ModelConfig
from longtail.system.machine import MAX_INT32

_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_MAX_LAYERS = 10_000
_MAX_HEADS = 65_536
"""Maximum number of heads, and of dimensions of a head."""
# Defaults of the families' configuration classes; None: derived from other fields.
_MAX_POSITIONS = {"llama": 2048, "mistral": 131_072, "qwen2": 32_768, "qwen3": 32_768}
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}
_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
_YARN = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
"""Fields of these scalings that `RopeConfig` has, too."""
_SLIDING, _FULL = "sliding_attention", "full_attention"


@final
class Fields:
    """A JSON object with typed access to its values; errors name file and field."""

    def __init__(self, raw: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._raw, self.where, self._prefix = raw, where, prefix

    def get(self, key: str, default: Any = None) -> Any:
        """Return the raw value; null counts as a value."""
        return self._raw.get(key, default)

    def everything(self) -> dict[str, Any]:
        """Return a copy of the object."""
        return dict(self._raw)

    def section(self, key: str) -> "Fields":
        """Return the object at `key`, an empty one if it is absent or null."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._error(key, "an object or null")
        return Fields(value or {}, self.where, f"{self._prefix}{key}.")

    def optional_integer(
        self, key: str, default: int | None = None, most: int = MAX_INT32
    ) -> int | None:
        """Return a positive integer, or None for null."""
        is_none = self._raw.get(key, default) is None
        return None if is_none else self.integer(key, default, most=most)

    def integer(
        self, key: str, default: int | None = None, least: int = 1, most: int = MAX_INT32
    ) -> int:
        """Return an integer within bounds; without `default` it is required."""
        value = self._required(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self._error(key, f"an integer from {least} to {most}")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None for null."""
        return None if self._raw.get(key) is None else self.number(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; without `default` it is required."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self._error(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false; null counts as `default`."""
        value = self._raw.get(key)
        if value is not None and type(value) is not bool:
            raise self._error(key, "true or false")
        return default if value is None else value

    def _required(self, key: str, default: Any) -> Any:
        value = self._raw.get(key, default)
        value = default if value is None else value
        if value is None:
            raise ConfigError(
                f"{self.where}: {self._prefix}{key} is missing: copy the model's own config.json"
            )
        return value

    def _error(self, key: str, domain: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {self._prefix}{key} = {self._raw.get(key)!r:.80}: it must be {domain}"
        )


def _family(fields: Fields) -> Family:
    """Return the family of `architectures`, or of model_type if an older file has none."""
    named = fields.get("architectures") or [fields.get("model_type")]
    name = named[0] if isinstance(named, list) and named else named
    by_type = {family: family for family in _ARCHITECTURES.values()}
    family = (_ARCHITECTURES | by_type).get(str(name))
    if family is None:
        raise UnsupportedModelError(
            f"{fields.where}: architecture {name!r:.80} is not supported; supported: "
            + ", ".join(_ARCHITECTURES)
        )
    if fields.get("quantization_config") is not None:
        raise UnsupportedModelError(
            f"{fields.where}: quantization_config is set: quantized weights cannot be trained; use "
            "the float16, bfloat16 or float32 version of the model"
        )
    return family


def parse(fields: Fields) -> ModelConfig:
    """Parse a configuration; see `model.load_config` for the errors."""
    family = _family(fields)
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{fields.where}: hidden_act = {activation!r:.80} is not supported; supported: silu"
        )
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads", most=_MAX_HEADS)
    layers = fields.integer("num_hidden_layers", most=_MAX_LAYERS)
    kv_heads = fields.optional_integer("num_key_value_heads", _KV_HEADS[family]) or heads
    head_dim = fields.optional_integer("head_dim", _HEAD_DIM[family], most=_MAX_HEADS)
    if head_dim is None and hidden % heads:
        raise ConfigError(
            f"{fields.where}: hidden_size = {hidden} is not a multiple of num_attention_heads = "
            f"{heads}: give head_dim"
        )
    head_dim = head_dim or hidden // heads
    if heads % kv_heads:
        raise ConfigError(
            f"{fields.where}: num_attention_heads = {heads} is not a multiple of "
            f"num_key_value_heads = {kv_heads}: one of them is wrong"
        )
    if head_dim % 2 or head_dim > _MAX_HEADS:
        raise ConfigError(
            f"{fields.where}: head_dim = {head_dim}: it must be even and at most {_MAX_HEADS}"
        )
    max_positions = fields.integer("max_position_embeddings", _MAX_POSITIONS[family])
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_checked_rope(_parse_rope(fields, max_positions), head_dim, fields),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and fields.flag("mlp_bias", False),
        qk_norm=family == "qwen3",
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        windows=_parse_windows(fields, family, layers),
    )


def _parse_rope(fields: Fields, max_positions: int) -> RopeConfig:
    """Parse rope_parameters (transformers 5), or rope_theta and rope_scaling (4)."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    rope = fields.section(key)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling not in get_args(RopeScaling):
        raise UnsupportedModelError(
            f"{fields.where}: {key}.rope_type = {scaling!r:.80} is not supported; supported: "
            + ", ".join(get_args(RopeScaling))
        )
    for holder in (fields, rope):
        if (part := holder.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"{fields.where}: partial_rotary_factor = {part!r:.80} is not supported; supported "
                "families rotate the whole head"
            )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10_000.0))
    if scaling == "default":
        return RopeConfig(theta=theta)
    if scaling == "linear":
        return RopeConfig(theta=theta, scaling=scaling, factor=rope.number("factor"))
    original = fields.optional_integer("original_max_position_embeddings") or rope.integer(
        "original_max_position_embeddings", max_positions
    )
    if scaling == "llama3":
        factors: dict[str, Any] = {name: rope.number(name) for name in _LLAMA3}
        return RopeConfig(theta=theta, scaling=scaling, original_max_positions=original, **factors)
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        factor=rope.optional_number("factor") or max_positions / original,
        original_max_positions=original,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _checked_rope(rope: RopeConfig, head_dim: int, fields: Fields) -> RopeConfig:
    """Refuse frequencies that are not finite; all logits would be NaN."""
    try:
        sound = Rope(head_dim, rope).is_finite
    except (ArithmeticError, ValueError):
        sound = False
    if not sound:
        raise ConfigError(
            f"{fields.where}: rope_theta = {rope.theta} and {rope.scaling!r} scaling give no "
            "finite frequencies: copy the model's own config.json"
        )
    return rope


def _parse_windows(fields: Fields, family: Family, layers: int) -> tuple[int, ...]:
    """Parse the sliding window of each layer; () if no layer has one."""
    if family == "llama":
        return ()
    window = fields.optional_integer("sliding_window", 4096) or 0
    if family == "mistral":
        return (window,) * layers if window else ()
    window = window if fields.flag("use_sliding_window", False) else 0
    kinds = fields.get("layer_types")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, least=0) if window else layers
        kinds = [_SLIDING if layer >= first else _FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ConfigError(
            f"{fields.where}: layer_types = {kinds!r:.80}: it must list one type for each of the "
            f"{layers} layers"
        )
    for layer, kind in enumerate(kinds):
        if kind not in (_SLIDING, _FULL):
            raise UnsupportedModelError(
                f"{fields.where}: layer_types[{layer}] = {kind!r:.80} is not supported; supported: "
                f"{_FULL}, {_SLIDING}"
            )
        if kind == _SLIDING and not window:
            raise ConfigError(
                f"{fields.where}: layer_types[{layer}] = {kind!r} but sliding_window is not in "
                "use: set use_sliding_window to true and sliding_window to its length"
            )
    windows = tuple(window if kind == _SLIDING else 0 for kind in kinds)
    return windows if any(windows) else ()


def emit(
    config: ModelConfig, dtype: torch.dtype, eos_ids: Sequence[int], bos_id: int | None = None
) -> dict[str, Any]:
    """Return config.json so that transformers 4, transformers 5 and `parse` read the same model."""
    by_family = {family: name for name, family in _ARCHITECTURES.items()}
    content: dict[str, Any] = {
        "architectures": [by_family[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": bos_id,  # explicit: the default of two families is ids 1 and 2
        "eos_token_id": list(eos_ids) or None,
    }
    content |= _emit_rope(config.rope) | _emit_windows(config)
    if config.family in ("llama", "qwen3"):
        content["attention_bias"] = config.qkv_bias
    if config.family == "llama":
        content["mlp_bias"] = config.mlp_bias
    windows = config.windows if any(config.windows) else ()
    if parse(Fields(content, "config.json")) != dataclasses.replace(config, windows=windows):
        raise ConfigError(
            f"a {config.family} model cannot have this shape in a Hugging Face directory: {config}"
        )
    return content


def _emit_rope(rope: RopeConfig) -> dict[str, Any]:
    """Return the rope's fields of transformers 4 and 5, so that no reader uses its default."""
    named: dict[str, Any] = {"rope_type": rope.scaling}
    if rope.scaling != "default":
        named["factor"] = rope.factor
    if rope.scaling in ("llama3", "yarn"):
        named["original_max_position_embeddings"] = rope.original_max_positions
    own = {"llama3": _LLAMA3, "yarn": _YARN}.get(rope.scaling, ())
    named |= {name: each for name in own if (each := getattr(rope, name)) is not None}
    return {
        "rope_parameters": {**named, "rope_theta": rope.theta},
        "rope_theta": rope.theta,
        "rope_scaling": named if rope.scaling != "default" else None,
    }


def _emit_windows(config: ModelConfig) -> dict[str, Any]:
    sliding = [config.window(layer) > 0 for layer in range(config.num_layers)]
    window = max(config.windows, default=0) or None
    if config.family == "llama":
        return {}
    if config.family == "mistral":
        return {"sliding_window": window}
    return {
        "use_sliding_window": any(sliding),
        "sliding_window": window,
        "max_window_layers": sliding.index(True) if any(sliding) else config.num_layers,
        "layer_types": [_SLIDING if slides else _FULL for slides in sliding],
    }
