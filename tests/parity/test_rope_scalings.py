"""Our frequencies against those of transformers, bit for bit: positions multiply every rounding."""

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longtail.model.hf.config import Fields, parse
from longtail.model.rope import Rope, RopeConfig, inverse_frequencies

LLAMA31 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
QWEN_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32_768,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "linear": (128, {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
    "llama 3.1": (128, LLAMA31),
    "qwen yarn": (128, QWEN_YARN),
    "yarn, given temperature": (128, {**QWEN_YARN, "attention_factor": 1.25}),
    "yarn, deepseek's temperature": (64, {**QWEN_YARN, "mscale": 1.0, "mscale_all_dim": 0.707}),
    "yarn, ramp not rounded": (
        64,
        {**QWEN_YARN, "truncate": False, "beta_fast": 24, "beta_slow": 2},
    ),
    "yarn, ramp of no width": (8, {**QWEN_YARN, "beta_fast": 2.0, "beta_slow": 2.0}),
    "yarn, factor from the positions": (64, {**QWEN_YARN, "factor": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_temperature_are_those_of_transformers(case: str) -> None:
    head_dim, rope = CASES[case]
    raw = {
        "vocab_size": 8, "hidden_size": 2 * head_dim, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 131_072,
    }  # fmt: skip
    theirs = LlamaConfig(**raw, rope_parameters=dict(rope))
    expected, temperature = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"))
    ours = parse(
        Fields({**raw, "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}, "test")
    )
    assert torch.equal(inverse_frequencies(head_dim, ours.rope), expected)
    unrotated = Rope(head_dim, ours.rope).rotation(torch.tensor([0]), torch.float64)
    assert math.isclose(unrotated.cos[0, 0, 0].item(), temperature, rel_tol=1e-15)


def test_working_precision_rounds_only_at_the_end() -> None:
    rope, positions = Rope(8, RopeConfig()), torch.tensor([100_000])
    rounded = rope.rotation(positions, torch.bfloat16).cos
    assert torch.equal(rounded, rope.rotation(positions, torch.float32).cos.bfloat16())


YARN = RopeConfig(scaling="yarn", factor=4.0, original_max_positions=64)


def test_frequencies_are_computed_under_the_meta_device() -> None:
    with torch.device("meta"):
        frequencies = inverse_frequencies(64, YARN)
    assert bool(torch.isfinite(frequencies).all())
