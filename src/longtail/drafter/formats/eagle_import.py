"""Published EAGLE drafters: reading the Hugging Face layout, which `eagle_export` writes.

    names        midlayer., layers.0., model. -> the parameters of `EagleLayer`, stacked
    d2t          target id = draft id + d2t[draft id]
    lm_head      kept only if it differs from the target's rows
    layer ids    counted as in vLLM or as in SGLang

Tensors and fields that `EagleLayer` does not support raise ConfigError with their name.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.drafter.eagle.fresh import feature_size
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TrainingRecord,
    identity,
)
from longtail.drafter.formats.eagle_export import LAYER_IDS, OWN_FIELDS, SECTION, layers_of, parts
from longtail.drafter.weights import wanted_ids
from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, parse
from longtail.model.hf.model import read_fields
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.hf.weights import read_tensors, tensor_names
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.packing import lay_out
from longtail.system.tensor_files import INTEGERS, Kind, kinds_of, require

LayerIds = Literal["auto", "input", "output"]
_PREFIX = "layers.0"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ASIDE = (_HEAD, _EMBEDDING, "d2t", "t2d")
_REMEDY = "longtail has no place for it; train one: longtail drafter train"
_OTHER = "give the drafter of this target with its own config.json, or train one: drafter train"
_SAMPLE_TEXT = "Let me think about this step by step. First, we need to find what is asked. " * 8
"""Sample on which the size of the target's features is measured."""


def is_published(path: Path) -> bool:
    """Return whether a directory holds a published drafter."""
    return any(plain_name(name) == "fc.weight" for name in tensor_names(path))


def plain_name(name: str) -> str:
    """Return the name of a tensor without the prefixes in which the files differ."""
    return name.removeprefix("model.").replace("midlayer.", f"{_PREFIX}.", 1)


def load_published(
    path: Path,
    name: str,
    target: Transformer,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype | None = None,
    layer_ids: LayerIds = "auto",
) -> LoadedDrafter:
    """Read a published drafter for `target`, whose name is `name`, onto its device.

    `layer_ids` is the convention of the tapped layers' ids; see `layers_of`. A power of two is
    moved from `fc` to `feature_scale`, without loss, so that training can continue. Raises
    ConfigError with the name of the tensor or field that does not fit.
    """
    fields = read_fields(path)
    tensors = {plain_name(each): tensor for each, tensor in read_tensors(path).items()}
    _refuse_variants(fields)
    shape, eagle3 = target.config, f"{_PREFIX}.hidden_norm.weight" in tensors
    draft_ids = _draft_ids(fields, tensors, shape)
    config = EagleConfig(
        recipe="eagle3" if eagle3 else "eagle1",
        target=shape,
        layers=_taps(fields, shape, layer_ids) if eagle3 else (),
        window=_window(fields),
        own_shape=_own_shape(fields, shape),
        norm_before_residual=eagle3 and fields.flag("norm_before_residual", False),
        draft_vocab_size=0 if draft_ids is None else len(draft_ids),
    )
    stacked = _stacked(fields, tensors, config)
    if _EMBEDDING in tensors and not _is_same(
        tensors[_EMBEDDING], target.embedding.weight.detach().cpu()
    ):
        raise _misfit(fields, f"{_EMBEDDING} is not the target's embedding")
    layer = EagleLayer(_scaled(config, target, tokenizer))
    layer.load_state_dict(stacked, assign=True)
    with torch.no_grad():
        layer.fc.weight.div_(layer.config.feature_scale)  # a power of two: exact
    return LoadedDrafter(
        layer=layer.to(target.device, dtype or stacked["fc.weight"].dtype),
        draft_ids=None if draft_ids is None else draft_ids.to(target.device),
        head=_own_head(fields, tensors.get(_HEAD), draft_ids, config, target),
        trained_on=identity(name, target, tokenizer),
        training=TrainingRecord(steps=0, tokens=0, unroll_steps=5 if eagle3 else 2),
    )


def _refuse_variants(fields: Fields) -> None:
    if fields.get("speculators_model_type") is not None:
        raise ConfigError(
            f"{fields.where}: it is in the layout of the library speculators, which longtail does "
            "not read: give a drafter in the layout of vLLM's LlamaForCausalLMEagle3"
        )
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if fields.flag(name, False):
            raise ConfigError(f"{fields.where}: {name} = true: {_REMEDY}")
    if (layers := fields.integer("num_hidden_layers", 1)) != 1:
        raise ConfigError(
            f"{fields.where}: num_hidden_layers = {layers}: a drafter here is one layer; {_REMEDY}"
        )


def _misfit(fields: Fields, what: str) -> ConfigError:
    return ConfigError(f"{fields.where}: {what}: {_OTHER}")


def _own_shape(fields: Fields, target: ModelConfig) -> ModelConfig | None:
    """Read the layer's shape; None if it is the target's."""
    read = parse(
        Fields(
            fields.everything() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
            fields.where,
        )
    )
    for name in ("hidden_size", "vocab_size"):
        mine, theirs = asdict(target)[name], asdict(read)[name]
        if mine != theirs:
            raise _misfit(fields, f"{name} = {theirs}, the target has {mine}")
    own = replace(target, **{name: getattr(read, name) for name in OWN_FIELDS})
    return None if own == target else own


def _taps(fields: Fields, target: ModelConfig, convention: LayerIds) -> tuple[int, ...]:
    kept = fields.section(SECTION).get("layers")
    ids = kept or fields.get(LAYER_IDS) or fields.section("eagle_config").get(LAYER_IDS) or None
    is_list = isinstance(ids, list) and all(type(each) is int for each in ids)
    layers: tuple[int, ...] = ()
    if ids is None or is_list:
        layers = layers_of(ids, target.num_layers, "input" if kept else convention)
    if not layers or not all(0 <= each < target.num_layers for each in layers):
        raise ConfigError(
            f"{fields.where}: {LAYER_IDS} = {ids!r}: they must be layers of the target, which has "
            f"{target.num_layers}; --layer-ids says how they are counted"
        )
    return tuple(sorted(set(layers)))


def _window(fields: Fields) -> int:
    """Return the window of our section, else the layer's sliding window, else 0 (unbounded)."""
    kept = fields.section(SECTION).get("window")
    if type(kept) is int and kept >= 0:
        return kept
    slides = fields.get("layer_types") == ["sliding_attention"]
    return (fields.optional_integer("sliding_window") or 0) if slides else 0


def _draft_ids(
    fields: Fields, tensors: Mapping[str, Tensor], target: ModelConfig
) -> Int[Tensor, "draft"] | None:
    """Convert offsets to target ids; None if the whole vocabulary can be drafted."""
    size = fields.optional_integer("draft_vocab_size") or target.vocab_size
    if "d2t" not in tensors:
        if size != target.vocab_size:
            raise _misfit(fields, f"draft_vocab_size = {size}, but there is no d2t")
        return None
    wanted = {
        "d2t": Kind(shape=(size,), dtypes=INTEGERS),
        "t2d": Kind(shape=(target.vocab_size,), dtypes=("bool", *INTEGERS)),
    }
    wanted = {name: kind for name, kind in wanted.items() if name in tensors}
    require(fields.where, {name: Kind.of(tensors[name]) for name in wanted}, wanted, _OTHER)
    ids = tensors["d2t"].to(torch.int64) + torch.arange(size)
    if fault := wanted_ids(target.vocab_size).fault(ids):
        raise _misfit(fields, f"d2t {fault}")
    allowed = tensors.get("t2d")
    if allowed is not None and set(allowed.nonzero().flatten().tolist()) != set(ids.tolist()):
        raise _misfit(fields, "t2d and d2t name other tokens")
    return ids


def _stacked(
    fields: Fields, tensors: Mapping[str, Tensor], config: EagleConfig
) -> dict[str, Tensor]:
    """Stack rows to our parameters in the dtype of `fc`; ConfigError for unused tensors."""
    table = parts(config, _PREFIX)
    wanted = {part.name: Kind(shape=part.shape) for group in table.values() for part in group}
    if _HEAD in tensors:
        rows = config.draft_vocab_size or config.target.vocab_size
        wanted[_HEAD] = Kind(shape=(rows, config.target.hidden_size))
    found = kinds_of(tensors)
    for name, tensor in tensors.items():
        is_zero_bias = name.endswith(".bias") and not tensor.any()
        is_derived = name.endswith("rotary_emb.inv_freq")
        if name not in wanted and (name in _ASIDE or is_zero_bias or is_derived):
            del found[name]
    require(fields.where, found, wanted, _OTHER)
    dtype = tensors["fc.weight"].dtype
    return {
        name: torch.cat([tensors[part.name] for part in group]).to(dtype)
        for name, group in table.items()
    }


def _own_head(
    fields: Fields,
    head: Tensor | None,
    draft_ids: Int[Tensor, "draft"] | None,
    config: EagleConfig,
    target: Transformer,
) -> Tensor | None:
    """Return the drafter's head; None if it is the target's."""
    rows = target.head.weight.detach().cpu()
    rows = rows if draft_ids is None else rows[draft_ids]
    if head is None or _is_same(head, rows):
        return None
    if config.recipe == "eagle1":
        raise _misfit(fields, "lm_head.weight is not the target's, which scores for EAGLE-1")
    return head.to(target.device)


def _is_same(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether two tensors are equal in the coarser of their dtypes."""
    coarser = theirs.dtype if theirs.dtype.itemsize <= mine.dtype.itemsize else mine.dtype
    return theirs.shape == mine.shape and torch.equal(theirs.to(coarser), mine.to(coarser))


def _scaled(config: EagleConfig, target: Transformer, tokenizer: Tokenizer) -> EagleConfig:
    """Choose the power of two that scales features to a size of about 1."""
    if config.recipe == "eagle1":
        return config
    tokens = tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=True)
    tokens = tokens or tuple(range(min(64, target.config.vocab_size)))
    size = feature_size(config, target, lay_out([tokens], [1]))
    return replace(config, feature_scale=2.0 ** -round(math.log2(size)) if size > 0 else 1.0)
