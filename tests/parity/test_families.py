"""Ours against transformers: every family, as a model read from a directory and as one written.

Random models of a few thousand parameters, no norm at one and no bias at zero. The sequences are
longer than every window and every `original_max_position_embeddings` here.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from longtail.model.attention import PackedAttention
from longtail.model.hf.model import load_config, load_model, save_model
from longtail.model.transformer import Transformer
from support.causal import model_of

SHAPE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rope_theta": 10_000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 16}
WINDOWED = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama3.2, tied": (
        LlamaConfig,
        {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama, head_dim of its own": (LlamaConfig, {"head_dim": 16}),
    "mistral, sliding": (MistralConfig, {"sliding_window": 7}),
    "qwen2, tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2, yarn": (Qwen2Config, {"rope_scaling": YARN}),
    "qwen2, upper layers slide": (Qwen2Config, WINDOWED),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3 with biases, tied": (
        Qwen3Config,
        {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3, deepseek's yarn": (Qwen3Config, {"head_dim": 16, "rope_scaling": DEEPSEEK_YARN}),
}
LENGTHS = (100, 37)
"""Two sequences: the first runs past three times the original positions of the scalings."""


def build_theirs(case: str) -> Any:
    config_class, changes = CASES[case]
    # copied, because a configuration writes rope_theta into the rope_scaling it is given
    return model_of(config_class(**copy.deepcopy({**SHAPE, **changes})), scale=0.8).eval()


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(SHAPE["vocab_size"], (n,), generator=generator) for n in LENGTHS]


def their_logits(model: Any) -> Tensor:
    """Each sequence by itself, so that nothing of packing is shared with what is tested."""
    with torch.no_grad():
        return torch.cat([model(tokens[None]).logits[0] for tokens in sequences()])


def our_logits(model: Transformer) -> Tensor:
    first, second = LENGTHS
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    attention = PackedAttention((0, first, first + second))
    with torch.no_grad():
        return model.logits(model(torch.cat(sequences()), positions, attention))


def open_with_transformers(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_sides_compute_the_same_from_a_directory_of_either(case: str, tmp_path: Path) -> None:
    theirs = build_theirs(case)
    theirs.save_pretrained(tmp_path / "theirs")
    expected, ours = their_logits(theirs), load_model(tmp_path / "theirs")
    # float32 rounding of logits of size 1 through 3 layers stays near 1e-6
    torch.testing.assert_close(our_logits(ours), expected, atol=1e-5, rtol=0)
    save_model(ours, tmp_path / "ours", eos_ids=(1, 2))
    reopened = open_with_transformers(tmp_path / "ours")
    assert type(reopened) is type(theirs)
    assert torch.equal(their_logits(reopened), expected)
    assert reopened.generation_config.eos_token_id == [1, 2]
    assert load_config(tmp_path / "ours") == ours.config
