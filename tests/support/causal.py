"""Tiny random models of many families, as transformers makes them, and texts for them."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from longtail.rl.packing import pack_rollouts
from longtail.types import SamplingParams, TrainBatch
from support.rollouts import rollout

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
HEADS = {"head_dim": 8, "sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {**HEADS, "query_pre_attn_scalar": 8},
    "gemma2": {**HEADS, "query_pre_attn_scalar": 8},  # its logits are capped
    "olmo2": {},
    "olmo3": {"sliding_window": 8},
    "smollm3": {},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {},  # its logits are scaled
    "phi3": {},
    "phi": {},  # its head has a bias
    "glm4": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "mixtral": EXPERTS,
    "gpt_oss": {
        **HEADS, **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    },
}  # fmt: skip
TEXTS = [tuple((7 * i + 3 * j * j) % 64 for j in range(n)) for i, n in enumerate((20, 13, 19, 5))]
PROMPTS = [6, 4, 6, 1]


def random_model(family: str, **changes: Any) -> PreTrainedModel:
    """A tiny model of the family, with logits of standard deviation about 1."""
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family], **changes})
    return model_of(config)


def model_of(config: Any, scale: float = 1.5) -> PreTrainedModel:
    """A random model of a configuration, no norm at one and no bias at zero."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(scale * noise * parameter.shape[-1] ** -0.5)
            else:
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1.0 + noise if "norm.weight" in name else noise)
    return model


def batch() -> TrainBatch:
    """The texts as completions of a step."""
    rollouts = [
        rollout(list(text), prompt, number=index, logprobs=(-1.0,) * (len(text) - prompt))
        for index, (text, prompt) in enumerate(zip(TEXTS, PROMPTS, strict=True))
    ]
    return pack_rollouts(rollouts, [1.0, -0.5, 0.3, -0.8], sampling=SamplingParams(), budget=40)
