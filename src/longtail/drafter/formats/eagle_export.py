"""The Hugging Face layout of EAGLE drafters, as vLLM reads it: names, tensors and config.json.

It is a one-layer Llama without embedding: `layers.0` in EAGLE-1, `midlayer` with its own norms and
head in EAGLE-3. SGLang reads EAGLE-3 the same if the engines' default layers are tapped. `d2t` is
an offset (target id = draft id + d2t[draft id]), `t2d` marks the target tokens that can be drafted.
Source: vLLM 0.32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, default_layers
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.errors import ConfigError
from longtail.model.hf.config import emit
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import SINGLE_FILE, Part
from longtail.model.transformer import ModelConfig, Transformer
from longtail.system import tensor_files
from longtail.system.files import replace_folder, writing

SECTION = "longtail"
"""Section of config.json that only `longtail drafter import` reads."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
OWN_FIELDS = ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "norm_eps", "rope")
"""Fields of a drafter's shape that may differ from the target's."""
_ARCHITECTURES = {"eagle1": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


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


def to_tensors(loaded: LoadedDrafter, target: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a drafter's tensors, with `feature_scale` folded into `fc`."""
    config, draft_ids, head = loaded.eagle.config, loaded.draft_ids, loaded.head
    state = {name: p.detach().cpu() for name, p in loaded.eagle.named_parameters()}
    state["fc.weight"] = state["fc.weight"] * config.feature_scale
    tensors = dict[str, Tensor]()
    prefix = "midlayer" if config.recipe == "eagle3" else "layers.0"
    for name, group in parts(config, prefix).items():
        rows = torch.split(state[name].to(dtype), [part.shape[0] for part in group])
        tensors |= zip((part.name for part in group), rows, strict=True)
    if config.recipe == "eagle3":
        if head is None:
            head = target.head.weight if draft_ids is None else target.head.weight[draft_ids]
        tensors["lm_head.weight"] = head.detach().cpu().to(dtype)
    if draft_ids is not None:
        ids = draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.target.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids] = True
    return tensors


def to_config(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the content of config.json."""
    shape, target = config.shape, config.target
    as_llama = ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        max_positions=target.max_positions,
        **{name: getattr(shape, name) for name in OWN_FIELDS},
    )
    content = emit(as_llama, dtype, ())
    del content["eos_token_id"], content["bos_token_id"]
    content["architectures"] = [_ARCHITECTURES[config.recipe]]
    content["bias"] = False
    if config.recipe == "eagle3":
        if config.window:
            content |= {"sliding_window": config.window, "layer_types": ["sliding_attention"]}
        content["draft_vocab_size"] = config.draft_vocab_size or target.vocab_size
        content["norm_before_residual"] = config.norm_before_residual
        content["target_hidden_size"] = target.hidden_size
        if config.layers != _engines_default(target.num_layers):
            eagle = {LAYER_IDS: list(config.layers), "use_aux_hidden_state": True}
            content["eagle_config"] = eagle
    return content | {SECTION: {"layers": list(config.layers), "window": config.window}}


def rounded(loaded: LoadedDrafter, dtype: torch.dtype) -> LoadedDrafter:
    """Return a drafter as EAGLE, in the dtype of the files, its scale folded; changes the layer.

    The layout of EAGLE-1 has no reduced vocabulary, so such a drafter gets the whole one.
    """
    layer, ids = loaded.eagle, loaded.draft_ids
    layer.fold()
    layer.to(dtype)
    if layer.config.recipe == "eagle1":
        layer.config, ids = replace(layer.config, draft_vocab_size=0), None
    head = None if loaded.head is None else loaded.head.to(dtype)
    return replace(loaded, layer=layer, draft_ids=ids, head=head)


def write_layout(path: Path, loaded: LoadedDrafter, target: Transformer) -> None:
    """Write config.json and the tensors of a drafter, in its dtype, into a directory."""
    path.mkdir(parents=True, exist_ok=True)
    config, dtype = loaded.eagle.config, loaded.eagle.dtype
    tensor_files.save(to_tensors(loaded, target, dtype), path / SINGLE_FILE)
    write_json(path / "config.json", to_config(config, dtype))


def export_drafter(
    out: Path, loaded: LoadedDrafter, target: Transformer, dtype: torch.dtype
) -> LoadedDrafter:
    """Write a drafter, as EAGLE, into the new directory `out` in `dtype`.

    Changes an EAGLE layer as `rounded` does, and returns the drafter as it was written. Raises
    ConfigError if `out` exists, CheckpointError if it cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists; remove it or choose another directory")
    loaded = rounded(loaded, dtype)
    with writing("the drafter", out):
        replace_folder(out, lambda folder: write_layout(folder, loaded, target))
    return loaded


def _engines_default(num_layers: int) -> tuple[int, ...]:
    return (2, num_layers // 2, num_layers - 3)


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
