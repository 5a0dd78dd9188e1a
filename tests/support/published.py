"""Random drafters for tests of the engines' layouts: ours, and published ones."""

from typing import Any

import torch
from torch import Tensor

from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe
from longtail.drafter.formats.checkpoint import LoadedDrafter, TrainingRecord, identity
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from support.tiny_models import tiny_model

VOCAB, HIDDEN = 128, 32
DRAFT_IDS = (1, 5, 7, 30, 64, 100)
RECORD = TrainingRecord(steps=5, tokens=900, unroll_steps=2, overlap=(0.6, 0.5), accept_len=1.9)


def target_of_six(seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """Make a random target with six layers and random norms."""
    return tiny_model(seed=seed, dtype=dtype, num_layers=6)


def our_drafter(
    target: Transformer,
    tokenizer: Tokenizer,
    recipe: Recipe = "eagle3",
    *,
    reduced: bool = False,
    layers: tuple[int, ...] = (1, 2, 4),
    **more: Any,
) -> LoadedDrafter:
    """Make a random drafter of ours, norms included."""
    config = EagleConfig(
        recipe=recipe,
        target=target.config,
        layers=layers if recipe == "eagle3" else (),
        window=16,
        draft_vocab_size=len(DRAFT_IDS) if reduced else 0,
        feature_scale=0.07 if recipe == "eagle3" else 1.0,
        **more,
    )
    layer = EagleLayer(config)
    generator = torch.Generator().manual_seed(5)
    layer.initialize(generator)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return LoadedDrafter(
        layer=layer,
        draft_ids=torch.tensor(DRAFT_IDS) if reduced else None,
        trained_on=identity("here", target, tokenizer),
        training=RECORD,
    )


def folded(loaded: LoadedDrafter) -> dict[str, Tensor]:
    """Fold the scale and copy the drafter's parameters."""
    loaded.layer.fold()
    return {name: p.detach().clone() for name, p in loaded.layer.named_parameters()}


def published_eagle3(seed: int = 0) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Make a published EAGLE-3 drafter whose shape, rope, vocabulary and head are its own."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, inner, taps = 2, 1, 8, 40, 3

    def matrix(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return drawn.to(torch.bfloat16)

    def norm() -> Tensor:
        return (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).to(torch.bfloat16)

    ids = torch.tensor(DRAFT_IDS)
    allowed = torch.zeros(VOCAB, dtype=torch.bool)
    allowed[ids] = True
    tensors = {
        "fc.weight": matrix(HIDDEN, taps * HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, heads * dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(inner, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, inner),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(len(ids), HIDDEN),
        "d2t": ids - torch.arange(len(ids)),
        "t2d": allowed,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": dim, "num_hidden_layers": 1, "vocab_size": VOCAB,
        "draft_vocab_size": len(ids), "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    return config, tensors
