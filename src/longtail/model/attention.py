"""The seam between the decoder and whatever keeps the context its tokens look at.

A forward pass is a flat list of tokens. Who may see whom is the business of an `Attention`: the
learner's looks inside packed sequences (`PackedAttention`, here), the rollout engine's looks into a
KV cache (`engine.kv_cache`). The decoder is the same code under both.
"""

import abc
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor


class Attention(abc.ABC):
    """What one forward pass attends to."""

    @abc.abstractmethod
    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend in `layer` with scale head_dim ** -0.5.

        `window` > 0 lets a token see itself and the `window - 1` positions before it; 0 sees all.
        """


def causal_window_mask(
    num_queries: int, num_keys: int, window: int, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Mask of the last `num_queries` of `num_keys` consecutive positions; True where visible.

    Example: num_queries=2, num_keys=4, window=2      keys 0 1 2 3
                                           query 2         . x x .
                                           query 3         . . x x
    """
    keys = torch.arange(num_keys, device=device)
    queries = keys[num_keys - num_queries :, None]
    visible = keys <= queries
    return visible & (keys > queries - window) if window else visible


@final
class PackedAttention(Attention):
    """Causal attention inside each of several sequences laid end to end, differentiable."""

    def __init__(self, cu_seqlens: Sequence[int]) -> None:
        self._lengths = [
            end - start for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False)
        ]

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Attend sequence by sequence: no padding is computed, no boundary is crossed."""
        outputs = []
        parts = zip(
            *(x.transpose(0, 1).split(self._lengths, dim=1) for x in (queries, keys, values)),
            strict=True,
        )
        for q, k, v in parts:  # each [heads, seq, head_dim]
            seq = q.shape[1]
            windowed = 0 < window < seq
            mask = causal_window_mask(seq, seq, window, q.device) if windowed else None
            out = F.scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=q.shape[0] != k.shape[0],
            )
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)
