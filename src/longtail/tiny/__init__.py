"""The embedded default: a small model that reasons in writing, and what it reasons about."""

from longtail.model.transformer import ModelConfig
from longtail.tiny.tokenizer import vocabulary


def model_config() -> ModelConfig:
    """Return the shape of the tiny reasoner: deep for its width, as reasoning models are."""
    return ModelConfig(
        family="qwen3",
        vocab_size=len(vocabulary()),
        hidden_size=128,
        intermediate_size=384,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=4096,
        qk_norm=True,
        tied_embeddings=True,
    )
