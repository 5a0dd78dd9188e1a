"""GGUF files of random tiny models, written by the package of llama.cpp."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch

from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Transformer
from support.tiny_models import CHAT_TEMPLATE, byte_level_backend

SPECIAL = ("<|end|>", "<user>", "<assistant>")
MERGES = ("a b", "ab ab", "Ġ Ġ", "1 2")


def tokens() -> list[str]:
    """Return a byte-level vocabulary of 256 bytes, the merges and special tokens."""
    alphabet = [token for token in byte_level_backend().get_vocab() if len(token) == 1]
    return [*sorted(alphabet), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


VOCAB_SIZE = len(tokens()) + 1
"""One embedding more than there are tokens."""


def vocabulary() -> dict[str, Any]:
    """Return the metadata of `tokens`, without the prefix tokenizer.ggml of their names."""
    words = tokens()
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": words,
        "token_type": [3 if word in SPECIAL else 1 for word in words],
        "merges": list(MERGES),
        "eos_token_id": words.index("<|end|>"),
    }


def write_gguf(
    path: Path,
    model: Transformer,
    *,
    words: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model of the family llama, its vocabulary, and more metadata and tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_chat_template(CHAT_TEMPLATE.replace("<eos>", "<|end|>"))
    named = {f"tokenizer.ggml.{name}": value for name, value in (words or vocabulary()).items()}
    for name, value in {**named, **(metadata or {})}.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in hf_rows(model).items():
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
        if heads:  # llama.cpp rotates neighbouring dimensions
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        renamed = names.get_name(name, (".weight",))
        writer.add_tensor(str(renamed), tensor.detach().contiguous().numpy())
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
