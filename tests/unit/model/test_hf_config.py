"""config.json of both transformers versions: fields, defaults and refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.rope import RopeConfig
from longtail.model.transformer import ModelConfig
from support.tiny_models import tiny_config

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(architecture: str, **changes: Any) -> ModelConfig:
    return parse(Fields({"architectures": [architecture], **SHAPE, **changes}, "config.json"))


QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}


def llama(**changes: Any) -> ModelConfig:
    return read("LlamaForCausalLM", **changes)


@pytest.mark.parametrize("kind", ["rope_type", "type"])
def test_both_versions_of_the_rope_fields_are_equal(kind):
    old = llama(rope_theta=500_000, rope_scaling={kind: "llama3", **LLAMA3})
    new = llama(rope_parameters={"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3})
    assert old == new
    assert new.rope == RopeConfig(
        theta=500_000.0,
        scaling="llama3",
        factor=8.0,
        original_max_positions=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def test_absent_fields_have_the_defaults_of_the_familys_class():
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    classes: dict[str, Any] = {
        "LlamaForCausalLM": LlamaConfig,
        "MistralForCausalLM": MistralConfig,
        "Qwen2ForCausalLM": Qwen2Config,
        "Qwen3ForCausalLM": Qwen3Config,
    }
    for architecture, config_class in classes.items():
        ours, theirs = read(architecture), config_class(**SHAPE)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.tied_embeddings == theirs.tie_word_embeddings
        assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
        head_dim = theirs.to_dict().get("head_dim") or 64 // 32
        assert ours.head_dim == head_dim


UPPER = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}
KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "max_window_layers": 4}
YARN = {"max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 4}}


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("Llama", {"num_key_value_heads": None}, {"num_kv_heads": 32}),
        ("Llama", {"attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
        ("Llama", {"mlp_bias": True}, {"mlp_bias": True, "qkv_bias": False}),
        ("Qwen2", {"attention_bias": True}, {"output_bias": False}),
        ("Mistral", {"sliding_window": 16}, {"windows": (16,) * 4}),
        ("Qwen2", UPPER, {"windows": (0, 0, 0, 16)}),
        ("Qwen2", {**UPPER, "use_sliding_window": False}, {"windows": ()}),
        ("Qwen2", {**UPPER, **KINDS}, {"windows": (16, 0, 16, 0)}),
    ],
)
def test_fields_are_read_as_transformers_means_them(architecture, changes, expected):
    config = read(f"{architecture}ForCausalLM", **changes)
    assert {name: getattr(config, name) for name in expected} == expected


def test_yarn_without_original_positions_scales_the_models_own():
    rope = read("Qwen2ForCausalLM", **YARN).rope
    assert (rope.original_max_positions, rope.factor) == (1024, 4.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "Qwen3ForCausalLM"]),
        ({"architectures": None, "model_type": "gemma"}, ["gemma", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "rope_scaling", "yarn"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
    ],
)
def test_unsupported_fields_are_refused_by_name(changes, words):
    with pytest.raises(UnsupportedModelError) as error:
        llama(**changes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'", "integer"]),
        ({"vocab_size": 10**12}, ["vocab_size = 1000000000000", "from 1 to 2147483647"]),
        ({"hidden_size": 2**30, "num_attention_heads": 8}, ["head_dim = 134217728", "65536"]),
        ({"rope_theta": 10**400}, ["rope_theta", "positive number"]),
        ({"rope_theta": 1e-320, "head_dim": 64}, ["no finite frequencies"]),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1.0},
            ["rope_theta = 1.0", "'yarn' scaling", "no finite frequencies"],
        ),
        ({"num_key_value_heads": 5}, ["num_key_value_heads", "5", "multiple"]),
        ({"num_attention_heads": 6}, ["hidden_size", "head_dim"]),
        ({"head_dim": 7}, ["head_dim", "even"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings", "true or false"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor", "missing"]),
        ({**QWEN2, "layer_types": ["full_attention"] * 3}, ["layer_types", "4 layers"]),
        ({**QWEN2, "layer_types": ["linear_attention"] * 4}, ["layer_types[0]", "linear_att"]),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 4}, ["[0]", "use_sliding_window"]),
        ({**QWEN2, "sliding_window": 0}, ["sliding_window", "from 1 to"]),
    ],
)
def test_the_error_names_the_field_with_an_impossible_value(changes, words):
    with pytest.raises(ConfigError) as error:
        llama(**changes)
    assert all(word in str(error.value) for word in ["config.json", *words])


@pytest.mark.parametrize("keys", [("rope_parameters",), ("rope_theta", "rope_scaling")])
def test_a_reader_of_one_version_finds_all_its_fields(keys):
    rope = RopeConfig(scaling="llama3", factor=8.0, original_max_positions=64)
    config = replace(tiny_config("llama"), rope=rope)
    content = emit(config, torch.float32, ())
    for key in keys:
        del content[key]
    assert parse(Fields(content, "config.json")) == config


def test_a_shape_outside_its_family_is_refused():
    for family, changes in (
        ("llama", {"qk_norm": True}),
        ("qwen2", {"qkv_bias": False}),
        ("mistral", {"windows": (8, 0)}),
        ("qwen3", {"windows": (8, 16)}),
    ):
        with pytest.raises(ConfigError, match=family):
            emit(replace(tiny_config(family), **changes), torch.float32, ())
