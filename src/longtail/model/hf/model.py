"""The Hugging Face door: directories in, directories out, all by config.json and safetensors.

Reads what `transformers` 4 and 5 write for the supported families and writes what both of them,
and what reads like them, open. No code of a model directory is run, no pickle is opened, nothing
is downloaded. The shapes in config.json are `model.hf.config`'s, the names of weights
`model.hf.weights`', text is `model.hf.tokenizer`'s business; their public names are also here.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from longtail.model.hf.weights import (
    check_weights,
    from_hf,
    read_tensors,
    read_weights,
    tensor_names,
    to_hf,
    write_tensors,
    write_weights,
)
from longtail.model.transformer import ModelConfig, Transformer
from longtail.system.files import read_json

__all__ = [
    "Tokenizer",
    "check_vocabulary",
    "from_hf",
    "load_config",
    "load_model",
    "load_tokenizer",
    "read_fields",
    "read_tensors",
    "save_model",
    "stored_dtype",
    "tensor_names",
    "to_hf",
    "write_tensors",
]

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load_config(path: Path | str) -> ModelConfig:
    """Read config.json of a model directory, in the spelling of transformers 4 or 5.

    Raises UnsupportedModelError for an architecture, rope or activation that is not ours, and
    ConfigError for whatever is missing or impossible.
    """
    return parse(read_fields(Path(path)))


def stored_dtype(path: Path | str) -> torch.dtype:
    """Return the dtype that config.json gives for the weights; float32 where it gives none."""
    fields = read_fields(Path(path))
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in _DTYPES:
        raise ConfigError(f"{fields.where}: dtype = {name!r:.80}: give one of {list(_DTYPES)}")
    return _DTYPES[name]


def load_model(
    path: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """Read a model directory; `dtype` None keeps the dtype it is stored in.

    Memory: the model and one tensor of the files. Raises ConfigError for missing, extra or
    misshapen tensors, NonFiniteError for NaN or infinity, each with the tensor's name.
    """
    path = Path(path)
    config = load_config(path)
    files = check_weights(config, path)  # before a size that config.json claims is allocated
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype or stored_dtype(path)).to_empty(device=device)
    if config.tied_embeddings:  # both conversions give the head a weight of its own
        embedding = model.embedding.weight
        assert isinstance(embedding, torch.nn.Parameter)
        model.head.weight = embedding
    read_weights(model, path, files)
    return model


def save_model(
    model: Transformer,
    path: Path | str,
    *,
    dtype: torch.dtype | None = None,
    eos_ids: Sequence[int] = (),
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write config.json, safetensors and, with `eos_ids`, generation_config.json.

    `AutoModelForCausalLM.from_pretrained` opens the directory. `dtype` None keeps the model's.
    Not atomic and not synced: that is the checkpoint's business. Raises CheckpointError when the
    disk refuses.
    """
    from safetensors import SafetensorError

    path, dtype = Path(path), dtype or model.dtype
    content = emit(model.config, dtype, eos_ids)
    tensors = to_hf(model.state_dict(), model.config)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_weights(tensors, path, dtype, max_shard_bytes)
        _write_json(path / "config.json", content)
        if eos_ids:
            _write_json(path / "generation_config.json", {"eos_token_id": list(eos_ids)})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the model cannot be written to {path}: {error}; free space or choose another path"
        ) from error


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def read_fields(path: Path) -> Fields:
    """Read config.json, whatever it describes; ConfigError where it is none."""
    if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        raise ConfigError(
            f"model.path = {str(path)!r} is not a directory: give the directory of a Hugging Face "
            "model; nothing is downloaded"
        )
    file = path / "config.json"
    if not file.is_file():
        raise ConfigError(f"{path} holds no config.json: point model.path at a model directory")
    try:
        raw = read_json(file)
    except (OSError, ValueError) as error:  # cannot be read, or is neither JSON nor text
        raise ConfigError(f"{file} is not JSON ({error}): copy the file again") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} must hold one JSON object: copy the file again")
    return Fields(raw, str(file))
