"""Hugging Face model directories: read and written as config.json and safetensors.

Reads what transformers 4 and 5 write for the supported families, and writes what both can open. No
code of a model directory is run, no pickle is opened, nothing is downloaded.
"""

import copy
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from longtail.errors import ConfigError
from longtail.model.attention import Attention, PackedAttention, SharedAttention
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.weights import check_weights, hf_rows, read_weights, write_weights
from longtail.model.kernels.scores import Head
from longtail.model.kernels.training_products import ROWS
from longtail.model.policy import Policy
from longtail.model.transformer import ModelConfig, Transformer
from longtail.system.files import read_object, writing
from longtail.system.tensor_files import FLOATS
from longtail.types import PackedSequences


@final
class PolicyTransformer(Transformer, Policy):
    """Our decoder as a policy: it computes packed sequences, and has Hugging Face's names."""

    def hidden(
        self, packed: PackedSequences, *, recompute: bool = False
    ) -> Float[Tensor, "at_least_tokens hidden"]:
        """Return final hidden states, under autocast on a CPU of more tokens than there are.

        The others are one more sequence: products then have a number of rows that suits them.
        """
        tokens, positions, ends = packed.tokens, packed.positions, packed.cu_seqlens
        places, missing = packed.places, -packed.num_tokens % ROWS
        if missing and self.head.cast is not None:
            tokens, positions = F.pad(tokens, (0, missing)), F.pad(positions, (0, missing))
            ends = (*ends, ends[-1] + missing)
            if places is not None:
                more = torch.arange(packed.num_tokens, len(tokens), device=places.device)
                places = torch.cat((places, more))
        attention: Attention = PackedAttention(ends)
        if places is not None:
            attention = SharedAttention(whole=attention, places=places)
        return self(tokens, positions, attention, recompute=recompute)

    def score_head(self) -> Head:
        """Return the LM head, its products in the dtype of autocast if that is enabled."""
        weight, cast, device = self.head.weight, self.head.cast, self.device.type
        if not torch.is_autocast_enabled(device):
            return Head(weight=weight, computed=weight.detach())
        computed = weight.detach().to(torch.get_autocast_dtype(device)) if cast is None else cast
        return Head(weight=weight, computed=computed)

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return all parameters."""
        return dict(self.requires_grad_(True).named_parameters())

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of the parameters by Hugging Face's names."""
        yield from hf_rows(self).items()

    def reference(self) -> "PolicyTransformer":
        """Return a frozen copy."""
        frozen = copy.deepcopy(self).requires_grad_(False)
        frozen.fuse()
        return frozen

    def save(self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None) -> None:
        """Write a Hugging Face directory."""
        save_model(self, path, eos_ids=eos_ids, bos_id=bos_id)

    def read(self, path: Path) -> Mapping[str, Tensor]:
        """Read the parameters of a directory that `save` wrote."""
        return dict(load_model(path, self.dtype).named_parameters())


def load_config(path: Path | str) -> ModelConfig:
    """Read config.json of a model directory.

    Raises UnsupportedModelError for an unsupported architecture, rope or activation, ConfigError
    for missing or impossible fields.
    """
    return parse(read_fields(Path(path)))


def stored_dtype(path: Path | str) -> torch.dtype:
    """Return the dtype of the weights by config.json; float32 if it has none."""
    fields = read_fields(Path(path))
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in FLOATS:
        raise ConfigError(f"{fields.where}: dtype = {name!r:.80}: give one of {list(FLOATS)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def load_model(
    path: Path | str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> PolicyTransformer:
    """Read a model directory; a `dtype` of None keeps the stored dtype.

    Takes memory for the model and one tensor. Raises ConfigError for missing, extra or misshapen
    tensors, and for NaN or infinity, each with the tensor's name.
    """
    path, config, dtype = Path(path), load_config(path), dtype or stored_dtype(path)
    files = check_weights(config, path)  # before sizes from config.json are allocated
    model = empty_model(config, dtype, device)
    read_weights(model, path, files)
    return model


def empty_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PolicyTransformer:
    """Return a model whose parameters are allocated but have no values yet."""
    with torch.device("meta"):
        model = PolicyTransformer(config)
    model = model.to(dtype).to_empty(device=device)
    if config.tied_embeddings:  # both conversions untie the head
        embedding = model.embedding.weight
        assert isinstance(embedding, torch.nn.Parameter)
        model.head.weight = embedding
    return model


def save_model(
    model: Transformer,
    path: Path | str,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write config.json, safetensors and, with `eos_ids`, generation_config.json.

    Writing is neither atomic nor synced; checkpoints take care of that. Raises CheckpointError if
    the files cannot be written.
    """
    path, content = Path(path), emit(model.config, model.dtype, eos_ids, bos_id)
    with writing("the model", path):
        path.mkdir(parents=True, exist_ok=True)
        write_weights(hf_rows(model), path, model.dtype, max_shard_bytes)
        write_json(path / "config.json", content)
        if eos_ids:
            generation = {"bos_token_id": bos_id, "eos_token_id": list(eos_ids)}
            write_json(path / "generation_config.json", generation)


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object to a file."""
    file.write_text(json.dumps(content, indent=2) + "\n")


def read_fields(path: Path) -> Fields:
    """Read config.json uninterpreted. Raises ConfigError if it is missing or malformed."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise ConfigError(
            f"model.path = {str(path)!r} is not a directory: give that of a Hugging Face model"
        )
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json: point model.path at a model directory")
    return Fields(read_object(file, allow_nan=True), str(file))
