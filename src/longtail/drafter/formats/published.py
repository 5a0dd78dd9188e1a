"""Import of published drafters from the layouts of the engines.

    names        midlayer., layers.0., model. -> the parameters of `EagleLayer`, stacked
    d2t          target id = draft id + d2t[draft id]
    lm_head      kept only if it differs from the target's rows
    layer ids    counted as in vLLM or as in SGLang

Tensors and fields that `EagleLayer` does not support (biases, norms of queries and keys, more
layers) raise ConfigError with their name; ignoring them would silently give bad drafts.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.fresh import feature_size
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TargetIdentity,
    TrainingRecord,
    identity,
    read_record,
    tokenizer_digest,
)
from longtail.drafter.formats.layouts import SECTION, layers_of, parts
from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, parse
from longtail.model.hf.model import read_fields
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.hf.weights import read_tensors, tensor_names
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.packing import lay_out

LayerIds = Literal["auto", "input", "output"]
_PREFIX = "layers.0"
_ASIDE = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
_REMEDY = "longtail has no place for it; train one: longtail drafter train"
_SAMPLE_TEXT = "Let me think about this step by step. First, we need to find what is asked. " * 8
"""Sample on which the size of the target's features is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Interpretation of fields that the files leave open.

    Example: ImportOptions(layer_ids="output", window=64)
    """

    layer_ids: LayerIds = "auto"
    """Convention of the tapped layers' ids; see `layers_of`."""
    window: int | None = None
    """Attention window in pairs, 0: unbounded; None: that of the files."""


DEFAULT_OPTIONS = ImportOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Contents of a published directory, translated but not compared with the target's weights.

    Example: Published(config=config, tensors={"fc.weight": ...}, draft_ids=None, head=None,
                       embedding=None)
    """

    config: EagleConfig
    tensors: Mapping[str, Tensor]
    """Tensors by their name in `EagleLayer`."""
    draft_ids: Int[Tensor, "draft"] | None
    head: Float[Tensor, "draft hidden"] | None
    embedding: Float[Tensor, "vocab hidden"] | None


def is_published(path: Path) -> bool:
    """Return whether a directory holds a drafter in a layout of the engines."""
    return any(plain_name(name) == "fc.weight" for name in tensor_names(path))


def load_published(
    path: Path,
    name: str,
    target: Transformer,
    tokenizer: Tokenizer,
    *,
    dtype: torch.dtype | None = None,
    options: ImportOptions = DEFAULT_OPTIONS,
) -> LoadedDrafter:
    """Read a published drafter for `target`, whose name is `name`, onto its device.

    A power of two is moved from `fc` to `feature_scale`, without loss, so that training can
    continue. Raises ConfigError with the name of the tensor or field that does not fit.
    """
    fields = read_fields(path)
    tensors = {plain_name(each): tensor for each, tensor in read_tensors(path).items()}
    found = translate(fields, tensors, target.config, options)
    _require_embedding(fields, found.embedding, target)
    layer = EagleLayer(_scaled(found.config, target, tokenizer))
    with torch.no_grad():
        for each, parameter in layer.named_parameters():
            parameter.data = found.tensors[each].clone()
        layer.fc.weight.div_(layer.config.feature_scale)  # a power of two: exact
    stored = found.tensors["fc.weight"].dtype
    trained_on, training = _history(fields, name, target, tokenizer, found.config)
    return LoadedDrafter(
        layer=layer.to(target.device, dtype or stored),
        draft_ids=None if found.draft_ids is None else found.draft_ids.to(target.device),
        head=_own_head(fields, found, target),
        trained_on=trained_on,
        training=training,
    )


def translate(
    fields: Fields,
    tensors: Mapping[str, Tensor],
    target: ModelConfig,
    options: ImportOptions = DEFAULT_OPTIONS,
) -> Published:
    """Translate config.json and tensors (named as by `plain_name`) to ours."""
    outer = fields
    if fields.get("speculators_model_type") is not None:
        fields = Fields(
            outer.section("transformer_layer_config").everything(),
            outer.where,
            "transformer_layer_config.",
        )
    eagle3 = f"{_PREFIX}.hidden_norm.weight" in tensors
    _refuse_variants(outer, fields)
    config = EagleConfig(
        recipe="eagle3" if eagle3 else "eagle1",
        target=target,
        layers=_taps(outer, target, options.layer_ids) if eagle3 else (),
        window=_window(outer, fields) if options.window is None else options.window,
        own_shape=_own_shape(fields, target),
        norm_before_residual=eagle3 and outer.flag("norm_before_residual", outer is not fields),
    )
    ids = _draft_ids(outer, tensors, target)
    config = replace(config, draft_vocab_size=0 if ids is None else len(ids))
    return Published(
        config=config,
        tensors=_stacked(outer, tensors, config),
        draft_ids=ids,
        head=tensors.get("lm_head.weight"),
        embedding=tensors.get("embed_tokens.weight"),
    )


def plain_name(name: str) -> str:
    """Return the name of a tensor without the prefixes in which the layouts differ."""
    return name.removeprefix("model.").replace("midlayer.", f"{_PREFIX}.", 1)


def _refuse_variants(outer: Fields, fields: Fields) -> None:
    for name in ("norm_before_fc", "fc_norm", "norm_output"):
        if outer.flag(name, False):
            raise ConfigError(f"{outer.where}: {name} = true: {_REMEDY}")
    if (layers := fields.integer("num_hidden_layers", 1)) != 1:
        raise ConfigError(
            f"{outer.where}: num_hidden_layers = {layers}: a drafter here is one layer; {_REMEDY}"
        )


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
            raise ConfigError(
                f"{fields.where}: {name} = {theirs}, the target has {mine}: give the drafter of "
                "this target"
            )
    own = replace(
        target,
        intermediate_size=read.intermediate_size,
        num_heads=read.num_heads,
        num_kv_heads=read.num_kv_heads,
        head_dim=read.head_dim,
        norm_eps=read.norm_eps,
        rope=read.rope,
    )
    return None if own == target else own


def _taps(outer: Fields, target: ModelConfig, convention: LayerIds) -> tuple[int, ...]:
    if "layers" in (kept := outer.section(SECTION).everything()):
        return tuple(kept["layers"])
    key = "eagle_aux_hidden_state_layer_ids"
    ids = outer.get(key) or outer.section("eagle_config").get(key) or None
    is_list = isinstance(ids, list) and all(type(each) is int for each in ids)
    layers = layers_of(ids, target.num_layers, convention) if ids is None or is_list else ()
    if not layers or not all(0 <= each < target.num_layers for each in layers):
        raise ConfigError(
            f"{outer.where}: {key} = {ids!r}: they must be layers of the target, which has "
            f"{target.num_layers}; --layer-ids says how they are counted"
        )
    return tuple(sorted(set(layers)))


def _window(outer: Fields, fields: Fields) -> int:
    """Return the window of our section, else the layer's sliding window, else 0 (unbounded)."""
    kept = outer.section(SECTION).get("window")
    if type(kept) is int and kept >= 0:
        return kept
    slides = fields.get("layer_types") == ["sliding_attention"]
    return (fields.optional_integer("sliding_window") or 0) if slides else 0


def _draft_ids(
    outer: Fields, tensors: Mapping[str, Tensor], target: ModelConfig
) -> Int[Tensor, "draft"] | None:
    """Convert offsets to target ids; None if the whole vocabulary can be drafted."""
    size = outer.optional_integer("draft_vocab_size") or target.vocab_size
    offsets = tensors.get("d2t")
    if offsets is None:
        if size != target.vocab_size:
            raise ConfigError(
                f"{outer.where}: draft_vocab_size = {size} of {target.vocab_size}, but there is no "
                "d2t among the tensors: download the drafter again"
            )
        return None
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    inside = bool(((ids >= 0) & (ids < target.vocab_size)).all())
    if len(ids) != size or not inside or len(set(ids.tolist())) != len(ids):
        raise ConfigError(
            f"{outer.where}: d2t names {len(ids)} tokens, draft_vocab_size is {size} of "
            f"{target.vocab_size}: they must be as many, different, and the target's"
        )
    allowed = tensors.get("t2d")
    if allowed is not None and set(allowed.nonzero().flatten().tolist()) != set(ids.tolist()):
        raise ConfigError(f"{outer.where}: t2d and d2t name other tokens: download it again")
    return ids


def _stacked(
    outer: Fields, tensors: Mapping[str, Tensor], config: EagleConfig
) -> dict[str, Tensor]:
    """Stack rows to our parameters in the dtype of `fc`; ConfigError for unused tensors."""
    table = parts(config, _PREFIX)
    wanted = {part.name: part.shape for group in table.values() for part in group}
    for name, shape in wanted.items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            raise ConfigError(
                f"{outer.where}: {name} has shape {None if found is None else list(found)}, a "
                f"{config.recipe} drafter of this configuration has {list(shape)}: give the "
                "drafter of this target, with its own config.json"
            )
    for name, tensor in tensors.items():
        is_zero_bias = name.endswith(".bias") and not tensor.any()
        derived = name.endswith("rotary_emb.inv_freq")
        if name not in wanted and name not in _ASIDE and not (is_zero_bias or derived):
            raise ConfigError(f"{outer.where}: the tensor {name}: {_REMEDY}")
    head = tensors.get("lm_head.weight")
    rows = config.draft_vocab_size or config.target.vocab_size
    if head is not None and tuple(head.shape) != (rows, config.target.hidden_size):
        raise ConfigError(
            f"{outer.where}: lm_head.weight has shape {list(head.shape)}, expected "
            f"{[rows, config.target.hidden_size]}: give the drafter of this target"
        )
    dtype = tensors["fc.weight"].dtype
    return {
        name: torch.cat([tensors[part.name] for part in group]).to(dtype)
        for name, group in table.items()
    }


def _require_embedding(fields: Fields, embedding: Tensor | None, target: Transformer) -> None:
    mine = target.embedding.weight.detach().cpu()
    if embedding is None or _is_same(embedding, mine):
        return
    raise ConfigError(
        f"{fields.where}: embed_tokens.weight is not the target's embedding: a drafter here reads "
        "the target's; give the drafter of this target"
    )


def _own_head(fields: Fields, found: Published, target: Transformer) -> Tensor | None:
    """Return the drafter's head; None if it is the target's."""
    if found.head is None:
        return None
    rows = target.head.weight.detach().cpu()
    rows = rows if found.draft_ids is None else rows[found.draft_ids]
    if _is_same(found.head, rows):
        return None
    if found.config.recipe == "eagle1":
        raise ConfigError(
            f"{fields.where}: lm_head.weight is not the target's, whose head reads an "
            "EAGLE-1 drafter; give the drafter of this target"
        )
    return found.head.to(target.device)


def _is_same(theirs: Tensor, mine: Tensor) -> bool:
    """Return whether two tensors are equal in the coarser of their dtypes."""
    coarser = theirs.dtype if theirs.dtype.itemsize <= mine.dtype.itemsize else mine.dtype
    return theirs.shape == mine.shape and torch.equal(theirs.to(coarser), mine.to(coarser))


def _scaled(config: EagleConfig, target: Transformer, tokenizer: Tokenizer) -> EagleConfig:
    """Choose the power of two that scales features to a size of about 1."""
    if config.recipe == "eagle1":
        return config
    tokens = tokenizer.encode(_SAMPLE_TEXT) or tuple(range(min(64, target.config.vocab_size)))
    size = feature_size(config, target, lay_out([tokens], [1]))
    return replace(config, feature_scale=2.0 ** -round(math.log2(size)) if size > 0 else 1.0)


def _history(
    fields: Fields,
    name: str,
    target: Transformer,
    tokenizer: Tokenizer,
    config: EagleConfig,
) -> tuple[TargetIdentity, TrainingRecord]:
    """Read the record of our export; a drafter from elsewhere gets an empty record."""
    section: dict[str, Any] = fields.section(SECTION).everything()
    digest = tokenizer_digest(tokenizer)
    if "target" not in section or "training" not in section:
        record = TrainingRecord(
            steps=0, tokens=0, unroll_steps=5 if config.recipe == "eagle3" else 2
        )
        return identity(name, target, tokenizer), record
    try:
        found, training = TargetIdentity(**section["target"]), read_record(section["training"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{fields.where}: {SECTION} is malformed ({error!r})") from error
    if found.tokenizer != digest:
        raise ConfigError(
            f"{fields.where}: it was trained on {found.name}, whose tokenizer is "
            f"{found.tokenizer}; this target's is {digest}: give the drafter of this target"
        )
    return found, training
