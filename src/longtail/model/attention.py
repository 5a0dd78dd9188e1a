"""The interface between the decoder and the keys and values that its tokens attend to.

A forward pass computes a flat list of tokens. An `Attention` decides which keys each token attends
to: the learner's attends within packed sequences (`PackedAttention`), the rollout engine's to a KV
cache (`engine.kv_cache`). The decoder is the same code with both.
"""

import abc
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

Heads = Float[Tensor, "tokens heads head_dim"]
KVHeads = Float[Tensor, "tokens kv_heads head_dim"]


class Attention(abc.ABC):
    """Attention of one forward pass."""

    @abc.abstractmethod
    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Attend in `layer` with scale head_dim ** -0.5.

        With `window` > 0 a token attends to itself and the `window - 1` positions before it; with 0
        to all positions before it.
        """


def causal_window_mask(
    num_queries: int, num_keys: int, window: int, device: torch.device
) -> Bool[Tensor, "queries keys"]:
    """Return the mask of the last `num_queries` of `num_keys` positions; True where visible.

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
    """Differentiable causal attention within each of several concatenated sequences.

    On a GPU in bfloat16 one call of FlashAttention takes all sequences. Elsewhere adjacent
    sequences of equal length share one batched call, without a copy; padding sequences of similar
    length to share a call gains nothing on a heavy tail.
    """

    def __init__(self, cu_seqlens: Sequence[int]) -> None:
        self.cu_seqlens = tuple(cu_seqlens)
        """First token of each sequence, and the number of tokens."""
        lengths = (end - start for start, end in itertools.pairwise(cu_seqlens))
        self._runs = [
            (len(list(run)), length) for length, run in itertools.groupby(lengths) if length
        ]
        self._starts: Tensor | None = None
        """`cu_seqlens` on the GPU, from the first call there."""

    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Attend within each sequence, without padding."""
        if queries.is_cuda and torch.is_autocast_enabled("cuda"):  # norms of queries are float32
            half = torch.get_autocast_dtype("cuda")
            queries, keys, values = (x.to(half) for x in (queries, keys, values))
        fits = queries.dtype == torch.bfloat16 and queries.shape[-1] in range(8, 257, 8)
        if queries.is_cuda and fits and (flash := _varlen(window)):
            if self._starts is None:
                self._starts = torch.tensor(self.cu_seqlens, device=queries.device).int()
            longest = max(length for _, length in self._runs)
            return flash(queries, keys, values, self._starts, self._starts, longest, longest)
        sizes = [count * length for count, length in self._runs]
        parts = zip(
            *(torch.split(x, sizes) for x in (queries, keys, values)), self._runs, strict=True
        )
        return torch.cat([_attend_equal(q, k, v, count, window) for q, k, v, (count, _) in parts])


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SharedAttention(Attention):
    """Attention of sequences that share tokens: of whole ones, then each token's own is kept."""

    whole: Attention
    places: Int[Tensor, "laid"]
    """Index of each token of the whole sequences among the computed tokens."""

    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Attend as if each sequence had its own tokens."""
        q, k, v = (x.index_select(0, self.places) for x in (queries, keys, values))
        return self.whole.attend(layer, q, k, v, window).index_select(0, self._firsts)

    @cached_property
    def _firsts(self) -> Int[Tensor, "tokens"]:
        return first_places(self.places)


def first_places(places: Int[Tensor, "laid"]) -> Int[Tensor, "tokens"]:
    """Return the index of each token's first place in the whole sequences.

    Example: places 0 1 2 3 0 1 4 -> 0 1 2 3 6
    """
    numbers = torch.arange(len(places), device=places.device)
    firsts = numbers.new_full((int(places.max()) + 1,), len(numbers))
    return firsts.scatter_reduce_(0, places, numbers, "amin")


@cache
def _varlen(window: int) -> Callable[..., Tensor] | None:
    """Return causal FlashAttention of packed sequences; None where PyTorch has none for `window`.

    PyTorch 2.10 has no windows; later ones ask for `enable_gqa`.
    """
    from torch.nn.attention import varlen

    attend: Any = varlen.varlen_attn
    named = inspect.signature(attend).parameters
    more = {"enable_gqa": True} if "enable_gqa" in named else {}
    if "window_size" in named:  # of the positions before a token, so without itself
        return partial(attend, window_size=(window - 1, 0), **more)
    return None if window else partial(attend, is_causal=True, **more)


def _attend_equal(queries: Heads, keys: KVHeads, values: KVHeads, count: int, window: int) -> Heads:
    """Attend within each of `count` sequences of equal length."""
    q, k, v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (queries, keys, values))
    seq = q.shape[2]  # [count, heads, seq, head_dim]
    mask = causal_window_mask(seq, seq, window, q.device) if 0 < window < seq else None
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1)
