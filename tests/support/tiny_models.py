"""Random models and tokenizers that run in milliseconds, shared by all tests."""

import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers import Tokenizer as Backend

from longtail.model.hf.model import PolicyTransformer, save_model
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.kernels import native
from longtail.model.rope import RopeConfig
from longtail.model.transformer import Family, ModelConfig

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

NATIVE_DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            native.layout(dtype) is None, reason=f"no native product in {dtype} on this machine"
        ),
        id=str(dtype),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
"""Dtypes in which a token's bits do not depend on its batch."""


def tiny_config(family: Family = "qwen3", vocab_size: int = 128) -> ModelConfig:
    """Return a shape with two layers, four query and two KV heads, and the family's features."""
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16 if family == "qwen3" else 8,
        max_positions=512,
        rope=RopeConfig(theta=10_000.0),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=family == "qwen2",
        windows=(8, 8) if family == "mistral" else (),
    )


def tiny_model(
    family: Family = "qwen3",
    vocab_size: int = 128,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **shape: Any,
) -> PolicyTransformer:
    """Return a random model with logits of standard deviation 1 and random norms and biases."""
    generator = torch.Generator().manual_seed(seed)
    model = PolicyTransformer(replace(tiny_config(family, vocab_size), **shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.1 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.1 * noise)
            elif name == "embedding.weight" and not model.config.tied_embeddings:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
    return model.to(dtype)


def byte_level_backend() -> Backend:
    """Return a byte-level backend whose longest token is 'abab', with <eos> added."""
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120")]  # the last is two blanks
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Backend(models.BPE({word: index for index, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


def sentencepiece_tokenizer(added: Sequence[str] = (), *, special: bool = True) -> Tokenizer:
    """Return a tokenizer like Llama 2's: a text begins with a space, unknown letters are bytes."""
    from transformers import PreTrainedTokenizerFast

    merges = [("\u2581", "\u2581"), ("\u2581", "a"), ("\u2581a", "b")]
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"ab</>",
    ]
    words += ["".join(pair) for pair in merges]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Backend(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_tokens([AddedToken(word, special=special, normalized=False) for word in added])
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    return Tokenizer(inner, (2,))


def tiny_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, *, adds_special: bool = False
) -> Tokenizer:
    """Return a tokenizer of printable ASCII after <pad> <eos> <unk> <user> <assistant>.

    `adds_special`: of its own it puts <pad>, which is then its BOS, before a text and <eos> behind.
    """
    from transformers import PreTrainedTokenizerFast  # here, because it takes seconds

    symbols = (*SPECIAL, *string.printable)
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    begin = {"bos_token": "<pad>"} if adds_special else {}
    if adds_special:
        backend.post_processor = processors.TemplateProcessing(
            single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
        )
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", **begin
    )
    inner.chat_template = chat_template
    return Tokenizer(inner, (vocabulary["<eos>"],), None, inner.bos_token_id)


def save_tiny(path: Path) -> Path:
    """Write a tiny model with its tokenizer, and return the directory."""
    tokenizer = tiny_tokenizer()
    save_model(tiny_model(), path, eos_ids=tokenizer.eos_ids)
    tokenizer.save(path)
    return path
