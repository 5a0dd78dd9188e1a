"""Sizes that follow from a decoder's shape: weights, keys and values, activations."""

import torch

from longtail.model.transformer import ModelConfig, Transformer


def count_parameters(shape: ModelConfig) -> int:
    """Count the weights of a decoder of this shape; a tied head is counted once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(shape).parameters())


def activation_bytes(shape: ModelConfig, tokens: int, element: int, *, recompute: bool) -> int:
    """Bound the bytes that the decoder keeps for the backward pass of one micro-batch.

    A layer keeps four residuals, queries, keys and values before and after norm and rotation, two
    outputs of attention, and five widths of the feed-forward. Checkpointed layers keep their input
    alone, except for the one being recomputed.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rotated = (2 if shape.qk_norm else 1) * (heads + kv_heads)
    layer = 4 * shape.hidden_size + rotated + 3 * heads + 2 * kv_heads + 5 * shape.intermediate_size
    kept = shape.num_layers * shape.hidden_size + layer if recompute else shape.num_layers * layer
    return tokens * element * (kept + 2 * shape.hidden_size)


def kv_bytes(shape: ModelConfig, element: int) -> int:
    """Return the bytes of keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element
