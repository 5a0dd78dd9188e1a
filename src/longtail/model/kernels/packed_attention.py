"""Causal attention within packed sequences on a CPU: one call for all of them, with its gradients.

packed.c reads queries, keys and values where the projection left them, and computes in float32,
whatever their dtype. PyTorch makes a call for each sequence, with copies of keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.attention import Attention, Heads, KVHeads, PackedAttention
from longtail.model.kernels import native
from longtail.model.kernels.training_products import apply

_LANES, _QUERIES = 16, 48
"""Elements of a vector and queries of a block in packed.c."""


@final
class NativePackedAttention(Attention):
    """Attention of `PackedAttention`, by packed.c."""

    def __init__(self, given: PackedAttention) -> None:
        self._given = given
        self._starts = torch.tensor(given.cu_seqlens, dtype=torch.int64)

    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Attend in all sequences with one call, where heads are whole vectors."""
        if queries.shape[-1] % _LANES:
            return self._given.attend(layer, queries, keys, values, window)
        functions = native.functions(queries.dtype)
        out: Heads = apply(_Attend, functions, queries, keys, values, self._starts, window)
        return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        functions: Mapping[str, Callable[..., None]],
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        window: int,
    ) -> Tensor:
        queries, keys, values = _alike((queries, keys, values))
        tokens, heads, dim = queries.shape
        shape = heads, keys.shape[1], dim, window
        out = queries.new_empty(tokens, heads, dim)
        logs = torch.empty(tokens, heads)
        longest = int(starts.diff().max()) if len(starts) > 1 else 0
        padded = -(-longest // _QUERIES) * _QUERIES
        room = 2 * padded * dim + (_QUERIES + 6) * dim + 6 * padded
        threads = torch.get_num_threads()
        scratch = torch.empty(threads, room)
        functions["attend_packed"](
            queries, keys, values, queries.stride(0), starts, len(starts) - 1, out, logs, scratch,
            room, *shape, threads,
        )  # fmt: skip
        ctx.save_for_backward(queries, keys, values, logs, starts)
        ctx.functions, ctx.shape, ctx.padded = functions, shape, padded
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        queries, keys, values, logs, starts = ctx.saved_tensors
        heads, kv_heads, dim, _ = ctx.shape
        grads = torch.empty(len(queries), heads + 2 * kv_heads, dim, dtype=queries.dtype)
        parts = torch.split(grads, [heads, kv_heads, kv_heads], 1)
        padded = ctx.padded
        room = (5 * padded + 2 * _QUERIES + 6) * dim + 2 * _QUERIES * padded
        threads = torch.get_num_threads()
        scratch = torch.empty(threads, room)
        ctx.functions["attend_packed_backward"](
            queries, keys, values, queries.stride(0), starts, len(starts) - 1, logs,
            grad_out.contiguous(), *parts, grads.stride(0), scratch, room, *ctx.shape, threads,
        )  # fmt: skip
        return None, *parts, None, None


def _alike(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors with dense heads and one stride between tokens, copied if they have not."""
    stride = parts[0].stride(0)
    alike = all(
        part.stride(0) == stride and part.stride(2) == 1 and part.stride(1) == part.shape[2]
        for part in parts
    )
    if alike:
        return parts
    return torch.split(torch.cat(tuple(parts), 1), [part.shape[1] for part in parts], 1)
