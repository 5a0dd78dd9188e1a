"""GGUF files of Llama-type models, converted to Hugging Face directories.

    metadata --> config.json, tokenizer.json, tokenizer_config.json, generation_config.json
    tensors, dequantised and renamed --> model.safetensors

A converted model is in the user's cache, under the digest of the file. The order of rows of queries
and keys of the architecture llama is that of llama.cpp, which rotates neighbouring dimensions; it
is undone here. transformers' own reader of GGUF yields the same tensors (tests/parity).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import layout, require_tensors, write_weights
from longtail.model.rope import RopeConfig, inverse_frequencies
from longtail.model.sources.gguf_file import GGUFFile
from longtail.model.sources.gguf_tokenizer import end_ids, tokenizer_files
from longtail.model.transformer import ModelConfig
from longtail.system.cache import build_once
from longtail.system.files import fingerprint

KIND = "models"
"""Folder of converted models in the cache."""
CONVERSION = 1
"""Version of the conversion, part of the name of its result."""
_MAX_SHARD_BYTES = 5 * 2**30
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")
_FREQUENCIES = "rope_freqs.weight"
"""Factors of the frequencies of llama3's rope, whose parameters the metadata does not hold."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_POSITIONS = 8192


def model_of(file: Path, where: str, log: Callable[[str], None]) -> Path:
    """Return the directory of a file's model in the user's cache, converted first if it is new."""

    def build(directory: Path) -> None:
        log(f"converting {file}, once")
        convert(file, directory, where)

    try:
        digest = fingerprint(file)["sha256"]
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}); check it") from error
    return build_once(KIND, entry_name(file.stem, digest), build)


def entry_name(name: str, digest: str) -> str:
    """Return the name of a converted file in the cache."""
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:80]}-{digest[:16]}-{CONVERSION}"


def convert(source: Path, directory: Path, where: str) -> None:
    """Write the model of a GGUF file as a Hugging Face directory.

    Raises ConfigError, beginning with `where`, for a malformed file and an unsupported model.
    """
    file = GGUFFile(source, where)
    config = _config(file)
    ends = end_ids(file)
    tokenizer, tokenizer_config, template = tokenizer_files(file)
    dtype = file.dtype()
    tensors = _tensors(file, config, dtype)
    directory.mkdir(parents=True)
    write_weights(tensors, directory, dtype, _MAX_SHARD_BYTES)
    write_json(directory / "config.json", emit(config, dtype, ends))
    write_json(directory / "generation_config.json", {"eos_token_id": list(ends)})
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _config(file: GGUFFile) -> ModelConfig:
    """Return the shape of the model, from the metadata and the names of tensors."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES or file.metadata.get(f"{architecture}.expert_count"):
        experts = " with experts" if architecture in _ARCHITECTURES else ""
        raise file.error(
            f"its architecture {architecture!r:.80}{experts} is not supported; supported: "
            + ", ".join(_ARCHITECTURES),
            "choose a dense model of one of them",
        )

    def get(key: str, default: Any = None) -> Any:
        found = file.metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise file.error(f"its metadata lacks {architecture}.{key}")
        return found

    if "token_embd.weight" not in file.tensors:
        raise file.error("it has no token_embd.weight, so it is no language model")
    heads, hidden = get("attention.head_count"), get("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    if not all(type(each) is int and each > 0 for each in (heads, hidden, kv_heads)):
        raise file.error(f"its metadata gives {heads!r:.40} heads for {hidden!r:.40} dimensions")
    head_dim = get("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise file.error(
                f"{architecture}.{key} = {get(key)!r:.40} is not supported, as heads have "
                f"{head_dim!r:.40} dimensions",
                "choose another model",
            )
    positions = get("context_length")
    content = {
        "architectures": [_ARCHITECTURES[architecture]],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, str(architecture)),
    }
    return parse(Fields(content, file.where))


def _rope_scaling(file: GGUFFile, architecture: str) -> dict[str, Any] | None:
    """Return rope_scaling of config.json; None for the rope as it is."""
    prefix = f"{architecture}.rope.scaling."
    kind = file.metadata.get(f"{prefix}type", "none")
    if _FREQUENCIES in file.tensors:
        factor = float(file.read(_FREQUENCIES).max())
        original = {"original_max_position_embeddings": _LLAMA3_POSITIONS}
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **original}
    if kind == "none":
        return None
    known = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
    read = {prefix + name for name in (*known, "type", "finetuned")}
    extra = [name for name in file.metadata if name.startswith(prefix) and name not in read]
    if kind not in ("linear", "yarn") or extra:
        raise file.error(
            f"{prefix}type = {kind!r:.40} {' with ' + extra[0] if extra else ''} is not supported; "
            "supported: none, linear, yarn",
            "use the model's own directory or hub id",
        )
    given = {theirs: file.metadata.get(prefix + ours) for ours, theirs in known.items()}
    return {"rope_type": kind} | {key: value for key, value in given.items() if value is not None}


def _check_frequencies(file: GGUFFile, config: ModelConfig) -> None:
    """Raise ConfigError unless the factors in the file are those of the configuration's rope."""
    plain = inverse_frequencies(config.head_dim, RopeConfig(theta=config.rope.theta))
    expected = plain / inverse_frequencies(config.head_dim, config.rope)
    found = file.read(_FREQUENCIES)
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4):
        raise file.error(
            f"{_FREQUENCIES} is not that of a rope of type llama3 of {_LLAMA3_POSITIONS} positions",
            "use the model's own directory or hub id",
        )


def _tensors(file: GGUFFile, config: ModelConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all tensors under Hugging Face's names; names and shapes are checked first."""
    ours = {name: _renamed(name) for name in file.tensors if name != _FREQUENCIES}
    shapes = {theirs: file.tensors[name].shape for name, theirs in ours.items()}
    require_tensors(layout(config), shapes, config, file.where)
    if _FREQUENCIES in file.tensors:
        _check_frequencies(file, config)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    found = {}
    for name, theirs in ours.items():
        tensor = file.read(name)
        kind = name.split(".")[-2]
        if config.family == "llama" and kind in heads:
            tensor = _halves(tensor, heads[kind])
        found[theirs] = tensor.to(dtype)
    return found


def _renamed(name: str) -> str:
    """Return the name of a tensor in a Hugging Face directory; an unknown one keeps its own."""
    match = _LAYER.fullmatch(name)
    if match is not None and match[2] in _NAMES:
        return f"model.layers.{int(match[1])}.{_NAMES[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_TOP_NAMES[stem]}.{kind}" if stem in _TOP_NAMES else name


def _halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of each head with first halves of the rotated pairs before second ones."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
