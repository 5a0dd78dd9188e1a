"""Drafter layouts of the serving engines: names, tensors and config.json, as pure functions.

    vllm          config.json of a one-layer Llama; EAGLE-1 or EAGLE-3, no tensors of the target
    sglang        the same tensors, other architecture names, tapped layers counted differently
    speculators   EAGLE-3 with the embedding, as the library speculators and vLLM read it
    hf            with embedding and head: self-contained, as published on the hub

The layer is `layers.0` in EAGLE-1 and speculators, `midlayer` in EAGLE-3. `d2t` is an offset
(target id = draft id + d2t[draft id]), `t2d` marks the target tokens that can be drafted. Engines
silently ignore unknown fields, so a layout that cannot express a drafter raises ConfigError.
Sources: vLLM 0.32 and SGLang 0.5.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, default_layers
from longtail.errors import ConfigError
from longtail.model.hf.config import emit
from longtail.model.hf.weights import Part
from longtail.model.transformer import ModelConfig, Transformer

Layout = Literal["vllm", "sglang", "speculators", "hf"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

SECTION = "longtail"
"""Section of config.json that only `longtail drafter import` reads."""
SPECULATORS_VERSION = "0.3.0"
_ARCHITECTURE: Mapping[tuple[str, str], str] = {
    ("eagle1", "vllm"): "LlamaForCausalLM",
    ("eagle1", "hf"): "LlamaForCausalLM",
    ("eagle1", "sglang"): "LlamaForCausalLMEagle",
    ("eagle3", "vllm"): "LlamaForCausalLMEagle3",
    ("eagle3", "hf"): "LlamaForCausalLMEagle3",
    ("eagle3", "sglang"): "LlamaForCausalLMEagle3",
    ("eagle3", "speculators"): "Eagle3DraftModel",
}


def parts(config: EagleConfig, prefix: str) -> dict[str, tuple[Part, ...]]:
    """Return, for each parameter of `EagleLayer`, the layout's tensors that are stacked to it."""
    shape = config.shape
    hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * dim, shape.num_kv_heads * dim
    eagle1 = config.recipe == "eagle1"
    inputs = hidden if eagle1 else 2 * hidden
    fused = 2 * hidden if eagle1 else config.feature_size

    def stack(inputs: int, rows: Mapping[str, int]) -> tuple[Part, ...]:
        return tuple(
            Part(name=f"{prefix}.{name}.weight", shape=(count, inputs))
            for name, count in rows.items()
        )

    def norm(name: str) -> tuple[Part, ...]:
        return (Part(name=f"{name}.weight", shape=(hidden,)),)

    heads = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    table = {
        "fc.weight": (Part(name="fc.weight", shape=(hidden, fused)),),
        "qkv.weight": stack(inputs, heads),
        "output.weight": stack(queries, {"self_attn.o_proj": hidden}),
        "feed_forward_norm.weight": norm(f"{prefix}.post_attention_layernorm"),
        "feed_forward.gate_up.weight": stack(
            hidden, {"mlp.gate_proj": inner, "mlp.up_proj": inner}
        ),
        "feed_forward.down.weight": stack(inner, {"mlp.down_proj": hidden}),
    }
    if not eagle1:
        table["embedding_norm.weight"] = norm(f"{prefix}.input_layernorm")
        table["feature_norm.weight"] = norm(f"{prefix}.hidden_norm")
        table["norm.weight"] = norm("norm")
    return table


def engine_window(layout: Layout, config: EagleConfig) -> int:
    """Return the attention window that an engine applies; 0: unbounded."""
    return config.window if layout in ("vllm", "speculators") and config.recipe == "eagle3" else 0


def check(layout: Layout, config: EagleConfig) -> None:
    """Raise ConfigError, with a remedy, if a layout cannot express a drafter."""
    remedy = "; vllm and hf can hold it: --to vllm"
    if (config.recipe, layout) not in _ARCHITECTURE:
        raise ConfigError(
            f"--to {layout}: it has no {config.recipe} that an engine loads: export with --to vllm "
            "or --to sglang, or train with drafter.recipe = eagle3"
        )
    if layout != "sglang" or config.recipe != "eagle3":
        return
    if len(config.layers) != 3 or 0 in config.layers:
        raise ConfigError(
            f"--to sglang: the drafter reads the layers {list(config.layers)}, but SGLang taps "
            f"three, of which none is the first{remedy}, or train with three drafter.layers"
        )
    if config.norm_before_residual:
        raise ConfigError(
            f"--to sglang: the drafter has norm_before_residual, which SGLang ignores{remedy}"
        )


def layer_tensors(layout: Layout, layer: EagleLayer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the layer's own tensors in a layout, with `feature_scale` folded into `fc`."""
    config = layer.config
    state = {name: p.detach().cpu() for name, p in layer.named_parameters()}
    state["fc.weight"] = state["fc.weight"] * config.feature_scale
    prefix = "midlayer" if config.recipe == "eagle3" and layout != "speculators" else "layers.0"
    return {
        part.name: rows.to(dtype)
        for name, group in parts(config, prefix).items()
        for part, rows in zip(
            group, state[name].split_with_sizes([part.shape[0] for part in group]), strict=True
        )
    }


def to_tensors(
    layout: Layout,
    layer: EagleLayer,
    target: Transformer,
    draft_ids: Int[Tensor, "draft"] | None,
    head: Float[Tensor, "draft hidden"] | None,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return a drafter's tensors in a layout, with `feature_scale` folded into `fc`.

    Raises ConfigError as `check` does.
    """
    config = layer.config
    check(layout, config)
    eagle3 = config.recipe == "eagle3"
    tensors = layer_tensors(layout, layer, dtype)
    if not eagle3 and layout == "sglang":  # its fc has a bias, random unless loaded
        tensors["fc.bias"] = torch.zeros(config.target.hidden_size, dtype=dtype)
    if layout in ("speculators", "hf"):
        tensors["embed_tokens.weight"] = target.embedding.weight.detach().cpu().to(dtype)
    if eagle3:
        if head is None:
            head = target.head.weight if draft_ids is None else target.head.weight[draft_ids]
        tensors["lm_head.weight"] = head.detach().cpu().to(dtype)
    if draft_ids is not None:
        ids = draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.target.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def to_config(
    layout: Layout, config: EagleConfig, dtype: torch.dtype, *, verifier: str, depth: int
) -> dict[str, Any]:
    """Return config.json; only speculators uses `verifier` (the target's name) and `depth`.

    Raises ConfigError as `check` does.
    """
    check(layout, config)
    shape, target = config.shape, config.target
    as_llama = ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=1,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_positions=target.max_positions,
        norm_eps=shape.norm_eps,
        rope=shape.rope,
    )
    content = emit(as_llama, dtype, ())
    del content["eos_token_id"], content["bos_token_id"]
    content["architectures"] = [_ARCHITECTURE[config.recipe, layout]]
    window = engine_window(layout, config)
    if window:
        content |= {"sliding_window": window, "layer_types": ["sliding_attention"]}
    content |= {"bias": layout == "sglang" and config.recipe == "eagle1"}
    section = {"layers": list(config.layers), "window": config.window, "layout": layout}
    if config.recipe == "eagle1":
        return content | {SECTION: section}
    layer_ids = _layer_ids(layout, config)
    eagle3: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size or target.vocab_size,
        "norm_before_residual": config.norm_before_residual,
    }
    if layout == "speculators":
        if layer_ids is not None:
            eagle3["eagle_aux_hidden_state_layer_ids"] = layer_ids
        architectures = emit(target, dtype, ())["architectures"]
        named = {"name_or_path": verifier, "architectures": architectures}
        return _speculators(content, eagle3, named, depth) | {SECTION: section}
    eagle3 |= {"target_hidden_size": target.hidden_size}
    if layer_ids is not None:
        eagle = {"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True}
        eagle3 |= {"eagle_config": eagle}
    return content | eagle3 | {SECTION: section}


def _layer_ids(layout: Layout, config: EagleConfig) -> list[int] | None:
    """Return the tapped layers as an engine counts them; None if they are its default.

    vLLM counts the layer whose input is read, as we do; SGLang the one whose output is read.
    """
    if config.layers == _engines_default(config.target.num_layers):
        return None
    return [layer - (layout == "sglang") for layer in config.layers]


def _engines_default(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


def _speculators(
    layer: Mapping[str, Any], eagle3: Mapping[str, Any], verifier: Mapping[str, Any], depth: int
) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": depth}
    return {
        "architectures": layer["architectures"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "dtype": layer["dtype"],
        **eagle3,
        "transformer_layer_config": {**layer, "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": verifier,
        },
    }


def layers_of(layer_ids: Sequence[int] | None, num_layers: int, convention: str) -> tuple[int, ...]:
    """Return the layers whose input is tapped, from ids in either convention.

    `input` is vLLM's, `output` SGLang's; `auto` means SGLang's if the ids are its default three
    layers, else vLLM's. Without ids (None) the engines' default is returned.

    Example: layers_of([1, 15, 28], 32, "auto") == (2, 16, 29) == layers_of(None, 32, "auto")
    """
    if layer_ids is None:
        return default_layers(num_layers)
    found = tuple(layer_ids)
    after = convention == "output"
    if convention == "auto":
        after = found == tuple(layer - 1 for layer in _engines_default(num_layers))
    return tuple(layer + after for layer in found)
