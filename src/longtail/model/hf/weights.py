"""Weights in Hugging Face's names: the map to our parameters, and safetensors files.

Some of our parameters are theirs concatenated along the rows: `attention.qkv` is q_proj, k_proj,
v_proj; `feed_forward.gate_up` is gate_proj, up_proj. All others are one to one.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longtail.errors import ConfigError, NonFiniteError, RequestError
from longtail.model.transformer import ModelConfig, Transformer
from longtail.system import tensor_files
from longtail.system.files import read_object
from longtail.system.tensor_files import Kind, Wanted, open_tensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_WRITTEN_BY_US = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_DERIVED_SUFFIX = "rotary_emb.inv_freq"  # in older llama files; the config determines it
_REMEDY = "the weights and config.json must be of the same model, and not be quantized"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A tensor of Hugging Face: all or some rows of one of our parameters."""

    name: str
    shape: tuple[int, ...]


def layout(config: ModelConfig) -> dict[str, tuple[Part, ...]]:
    """Return the tensors that are concatenated to each parameter of `Transformer`."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim

    def one(name: str, *shape: int) -> tuple[Part, ...]:
        return (Part(name=name, shape=shape),)

    def linear(ours: str, theirs: dict[str, int], inputs: int, bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            tail = (inputs,) if kind == "weight" else ()
            table[f"{ours}.{kind}"] = tuple(
                Part(name=f"{name}.{kind}", shape=(rows, *tail)) for name, rows in theirs.items()
            )

    table = {"embedding.weight": one(_EMBEDDING, config.vocab_size, hidden)}
    for i in range(config.num_layers):
        us, them = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{them}.self_attn", f"{them}.mlp"
        table[f"{us}.attention_norm.weight"] = one(f"{them}.input_layernorm.weight", hidden)
        projections = {f"{attention}.q_proj": queries}
        projections |= {f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        linear(f"{us}.attention.qkv", projections, hidden, config.qkv_bias)
        output = {f"{attention}.o_proj": hidden}
        linear(f"{us}.attention.output", output, queries, config.output_bias)
        if config.qk_norm:
            table[f"{us}.attention.q_norm.weight"] = one(f"{attention}.q_norm.weight", dim)
            table[f"{us}.attention.k_norm.weight"] = one(f"{attention}.k_norm.weight", dim)
        norm = one(f"{them}.post_attention_layernorm.weight", hidden)
        table[f"{us}.feed_forward_norm.weight"] = norm
        gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
        linear(f"{us}.feed_forward.gate_up", gate_up, hidden, config.mlp_bias)
        linear(f"{us}.feed_forward.down", {f"{mlp}.down_proj": hidden}, inner, config.mlp_bias)
    table["norm.weight"] = one("model.norm.weight", hidden)
    if not config.tied_embeddings:
        table["head.weight"] = one(_HEAD, config.vocab_size, hidden)
    return table


def check_weights(config: ModelConfig, path: Path) -> dict[str, Path]:
    """Compare the headers of a directory's weights with a configuration; return each tensor's file.

    Raises ConfigError with the names of missing, extra or misshapen tensors.
    """
    found = _located(path)
    kinds = {name: kind for name, (_, kind) in found.items()}
    require_layout(kinds, config, str(path))
    return {name: file for name, (file, _) in found.items()}


def hf_rows(model: Transformer) -> dict[str, Tensor]:
    """Return the rows of the model's parameters by Hugging Face's names; a write changes the model.

    A tied head is left out.
    """
    parameters = dict(model.named_parameters())
    targets: dict[str, Tensor] = {}
    for name, parts in layout(model.config).items():
        rows = parameters[name].detach().split_with_sizes([part.shape[0] for part in parts])
        targets |= {part.name: target for part, target in zip(parts, rows, strict=True)}
    return targets


def write_hf(model: Transformer, tensors: Iterable[tuple[str, Tensor]], source: str) -> None:
    """Copy all parameters by Hugging Face's names; each is read before the next is taken.

    Raises RequestError if `source` is of another model, NonFiniteError for NaN or infinity.
    """
    targets = hf_rows(model)
    missing = set(targets)
    for name, tensor in tensors:
        rows = targets.get(name)
        if rows is None and name == _HEAD:
            continue  # tied to the embedding
        if rows is None or rows.shape != tensor.shape:
            expected = "no such parameter" if rows is None else f"{tuple(rows.shape)}"
            raise RequestError(
                f"{source} is of another model: {name} has shape {tuple(tensor.shape)} there, and "
                f"longtail's {model.config.family} model has {expected}"
            )
        if not torch.stack(tensor.detach().aminmax()).isfinite().all():
            raise NonFiniteError(f"{name} is not finite in {source}")
        rows.copy_(tensor.detach())
        missing.discard(name)
    if missing:
        raise RequestError(f"{source} is of another model: it lacks {min(missing)}")


def read_weights(model: Transformer, path: Path, located: Mapping[str, Path]) -> None:
    """Read the model's parameters from a directory; one tensor of the files is in memory at a time.

    `located` is the result of `check_weights`. Raises ConfigError if a tied model has a head that
    differs from its embedding, or for NaN or infinity, each with the tensor's name.
    """
    targets = hf_rows(model)
    for file in sorted(set(located.values())):
        with open_tensors(file) as opened:
            for name, target in targets.items():
                if located[name] == file:
                    target.copy_(opened.read(name))
    if model.config.tied_embeddings and _HEAD in located:
        with open_tensors(located[_HEAD]) as opened:
            head, embedding = opened.read(_HEAD), model.embedding.weight
        if not torch.equal(head.to(embedding), embedding):
            raise ConfigError(
                f"{path}: tie_word_embeddings is true but {_HEAD} differs from {_EMBEDDING}: set "
                "tie_word_embeddings to false in config.json to use both"
            )


def write_weights(
    tensors: Mapping[str, Tensor], path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    """Write one model.safetensors, or shards of at most `max_shard_bytes` with their index.

    Earlier weights of the same naming are removed first, since a reader takes all files it finds.
    """
    for old in path.iterdir():
        if _WRITTEN_BY_US.fullmatch(old.name):
            old.unlink()
    sizes = {name: tensor.numel() * dtype.itemsize for name, tensor in tensors.items()}
    shards = _shards(sizes, max_shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = file if len(shards) > 1 else SINGLE_FILE
        weight_map |= dict.fromkeys(names, file)
        tensor_files.save({name: tensors[name].to("cpu", dtype) for name in names}, path / file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a directory into memory, in their stored dtypes.

    Raises ConfigError if there are none, or for NaN or infinity, with the tensor's name.
    """
    return {n: each for file in _weight_files(path) for n, each in tensor_files.read(file).items()}


def tensor_names(path: Path) -> frozenset[str]:
    """Return the tensor names of a directory without reading them; empty without weights."""
    if not ((path / SINGLE_FILE).is_file() or (path / INDEX_FILE).is_file()):
        return frozenset()
    return frozenset(tensor_kinds(path))


def tensor_kinds(path: Path) -> dict[str, Kind]:
    """Return what each tensor of a directory is, without reading it. Raises ConfigError."""
    return {name: each for name, (_, each) in _located(path).items()}


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Cut the names, in order, into shards that fit; a tensor above the limit has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a directory: the single one, or those of its index."""
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    index = path / INDEX_FILE
    if not index.is_file():
        pickled = sorted(file.name for file in path.glob("*.bin"))
        found = f" ({pickled[0]} is a pickle, which is never opened)" if pickled else ""
        raise ConfigError(
            f"{path} holds no {SINGLE_FILE} and no {INDEX_FILE}{found}: save the model with "
            "save_pretrained(..., safe_serialization=True) and point model.path there"
        )
    try:
        names = sorted(set(read_object(index, weight_map=dict)["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside the directory")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{index} is malformed: it must hold a weight_map from tensor names to file names of "
            "this directory; copy the file again"
        ) from error
    for name in names:
        if not os.path.isfile(path / name):  # Path.is_file raises for a name that is too long
            raise ConfigError(f"{path} lacks {name!a}, which {INDEX_FILE} names: copy it there")
    return [path / name for name in names]


def _located(path: Path) -> dict[str, tuple[Path, Kind]]:
    """Return file and kind of every tensor of a directory."""
    found = dict[str, tuple[Path, Kind]]()
    for file in _weight_files(path):
        with open_tensors(file) as opened:
            found |= {name: (file, kind) for name, kind in opened.kinds.items()}
    return found


def require_layout(kinds: Wanted, config: ModelConfig, where: str) -> None:
    """Raise ConfigError unless the tensors are those of the configuration."""
    wanted = {part.name: Kind(shape=part.shape) for row in layout(config).values() for part in row}
    found = {name: each for name, each in kinds.items() if not name.endswith(_DERIVED_SUFFIX)}
    if config.tied_embeddings:
        found.pop(_HEAD, None)
    elif _HEAD not in found:
        raise ConfigError(
            f"{where} lacks {_HEAD} and tie_word_embeddings is false: set it to true if the model "
            "shares its embedding, else copy the missing tensor"
        )
    tensor_files.require(where, found, wanted, _REMEDY)
