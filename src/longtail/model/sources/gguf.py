"""Converts GGUF files to Hugging Face directories.

A converted model is in the user's cache, under the digest of the file. A file is refused if not
every tensor of it is a tensor of the model.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import layout, require_layout, write_weights
from longtail.model.sources.gguf_tokenizer import check_tokenizer, field, tokenizer_files
from longtail.model.transformer import Family, ModelConfig
from longtail.system.cache import build_once
from longtail.system.files import sha256
from longtail.system.tensor_files import Kind

KIND = "models"
"""Folder of converted models in the cache."""
CONVERSION = 5
"""Version of the conversion, part of the name of its result."""
_DTYPE = torch.bfloat16
_FAMILIES: dict[Any, Family] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""Families that llama.cpp has; its Mistral is a Llama."""
_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Fields of config.json by those of the metadata."""
_MAX_SHARD_BYTES = 5 * 2**30
_ENDS = ("bos", "eos", "eot", "eom")
"""Tokens that begin a text, and that end text, turn and message."""
_REMEDY = "use the model's own directory or hub id"


def model_of(file: Path, where: str, log: Callable[[str], None], *, name: str = "") -> Path:
    """Return the directory of a file's model in the user's cache, converted first if it is new.

    It has the given name, else that of the file.
    """

    def build(directory: Path) -> None:
        log(f"converting {file} ({file.stat().st_size / 1e6:,.0f} MB), once, in about a minute")
        convert(file, directory, where, log)

    try:
        digest = sha256(file)
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}); check it") from error
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name or file.stem)[:80]
    return build_once(KIND, f"{stem}-{digest[:16]}-{CONVERSION}", build)


def convert(source: Path, directory: Path, where: str, log: Callable[[str], None]) -> None:
    """Write the model of a GGUF file as a Hugging Face directory, its weights as bfloat16.

    Raises ConfigError, beginning with `where`, for a malformed file and an unsupported model.
    """
    try:
        import gguf

        reader = gguf.GGUFReader(source)
        family = _family(reader)
        log("reading the tokenizer")
        content, settings, template = tokenizer_files(reader)
        log(f"reading {len(reader.tensors)} tensors")
        config = _config(reader, family)
        tensors = _tensors(reader, config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; {_REMEDY}") from error
    except Exception as error:  # the package raises any error for a malformed file
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ConfigError(f"{where}: the file cannot be read ({reason}); {_REMEDY}") from error
    log("writing them as bfloat16")
    directory.mkdir(parents=True)
    write_weights(tensors, directory, _DTYPE, _MAX_SHARD_BYTES)
    begin, *found = (field(reader, f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    ends = list(dict.fromkeys(end for end in found if end is not None))
    write_json(directory / "config.json", emit(config, _DTYPE, ends, begin))
    generation = {"bos_token_id": begin, "eos_token_id": ends}
    write_json(directory / "generation_config.json", generation)
    write_json(directory / "tokenizer.json", content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    write_json(directory / "tokenizer_config.json", settings)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _family(reader: Any) -> Family:
    """Return the family of a file. Raises ConfigError for metadata that is not read."""
    name = field(reader, "general.architecture")
    if (family := _FAMILIES.get(name)) is None:
        raise ConfigError(
            f"general.architecture = {name!r:.40} is not read from GGUF files, but "
            f"{', '.join(_FAMILIES)}"
        )
    scaling = field(reader, f"{name}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConfigError(f"{name}.rope.scaling.type = {scaling!r:.40} is not read")
    if any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        raise ConfigError("its frequencies of RoPE (rope_freqs, as in Llama 3.1) are not read")
    check_tokenizer(reader)
    return family


def _config(reader: Any, family: Family) -> ModelConfig:
    """Return the shape that the header gives; the vocabulary has the size of the embedding."""
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    fields = {theirs: field(reader, f"{family}.{name}") for name, theirs in _FIELDS.items()}
    fields["head_dim"] = fields["head_dim"] or field(reader, f"{family}.rope.dimension_count")
    fields["vocab_size"] = int(shapes["token_embd.weight"][1])
    fields["tie_word_embeddings"] = "output.weight" not in shapes
    return parse(Fields({"model_type": family, **fields}, "its header"))


def _tensors(reader: Any, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the weights by Hugging Face's names. Raises ConfigError unless all are the model's."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.family.upper()], config.num_layers)
    parts = [part.name for parts in layout(config).values() for part in parts]
    theirs = {names.get_name(name, (".weight", ".bias")): name for name in parts}
    found = {theirs.get(tensor.name, tensor.name): tensor for tensor in reader.tensors}
    shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in found.items()}
    kinds = {name: Kind(shape=each, dtypes=("float32",)) for name, each in shapes.items()}
    require_layout(kinds, config, "the file")
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    tensors = {}
    for name, each in found.items():
        weights = torch.tensor(gguf.dequantize(each.data, each.tensor_type)).to(_DTYPE)
        if config.family == "llama" and (count := heads.get(name.split(".")[-2])):
            # llama.cpp rotates neighbouring dimensions
            pairs = weights.view(count, -1, 2, *weights.shape[1:])
            weights = pairs.transpose(1, 2).reshape(weights.shape)
        tensors[name] = weights
    return tensors
