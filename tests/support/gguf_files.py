"""GGUF files of random tiny models, written by the package of llama.cpp."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from longtail.model.hf.weights import to_hf
from longtail.model.sources.gguf import _NAMES, _TOP_NAMES
from longtail.model.transformer import Transformer
from support.tiny_models import CHAT_TEMPLATE, byte_level_backend

SPECIAL = ("<|end|>", "<user>", "<assistant>")
MERGES = ("a b", "ab ab", "Ġ Ġ", "1 2")
OURS = {theirs: ours for ours, theirs in (_NAMES | _TOP_NAMES).items()}


def tokens() -> list[str]:
    """Return a byte-level vocabulary of 256 bytes, the merges and special tokens."""
    alphabet = [token for token in byte_level_backend().get_vocab() if len(token) == 1]
    return [*sorted(alphabet), *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]


VOCAB_SIZE = len(tokens()) + 1
"""One embedding more than there are tokens."""


def write_gguf(
    path: Path,
    model: Transformer,
    *,
    kind: str = "F32",
    pre: str = "gpt-2",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model with matrices of block format `kind`, and more metadata and tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, pre)
    for name, value in (metadata or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in to_hf(model.state_dict(), config).items():
        _add_tensor(writer, name, tensor, model, kind)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    words = tokens()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types([3 if word in SPECIAL else 1 for word in words])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(words.index("<|end|>"))
    writer.add_chat_template(CHAT_TEMPLATE.replace("<eos>", "<|end|>"))


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor, model: Transformer, kind: str
) -> None:
    stem, _, tail = name.rpartition(".")
    layer = stem.removeprefix("model.layers.").partition(".")
    renamed = OURS.get(stem) or f"blk.{layer[0]}.{OURS[layer[2]]}"
    config = model.config
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(renamed.split(".")[-1])
    if config.family == "llama" and heads:  # llama.cpp rotates neighbouring dimensions
        halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    values = tensor.detach().float().numpy()
    if values.ndim == 1 or kind == "F32":
        writer.add_tensor(f"{renamed}.{tail}", np.ascontiguousarray(values))
        return
    packed = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(f"{renamed}.{tail}", gguf.quantize(values, packed), raw_dtype=packed)
