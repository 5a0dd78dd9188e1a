"""Causal attention within packed sequences on a CPU: one call for all of them, with its gradients.

packed.c reads queries, keys and values where the projection left them, and computes in float32,
whatever their dtype. PyTorch makes a call for each sequence, with copies of keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.attention import Attention, Heads, KVHeads, PackedAttention
from longtail.model.kernels import native

_LANES, _QUERIES = 16, 48
"""Elements of a vector and queries of a block in packed.c."""


class _Shape(NamedTuple):
    """Sizes of one call, in the order of the arguments of packed.c."""

    heads: int
    kv_heads: int
    dim: int
    window: int


@final
class NativePackedAttention(Attention):
    """Attention of `PackedAttention`, by packed.c."""

    def __init__(self, cu_seqlens: Sequence[int]) -> None:
        self._starts = torch.tensor(list(cu_seqlens), dtype=torch.int64)

    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Attend in all sequences with one call."""
        if queries.shape[-1] % _LANES:
            return PackedAttention(self._starts.tolist()).attend(
                layer, queries, keys, values, window
            )
        return attend_packed(queries, keys, values, self._starts, window)


def attend_packed(
    queries: Float[Tensor, "tokens heads head_dim"],
    keys: Float[Tensor, "tokens kv_heads head_dim"],
    values: Float[Tensor, "tokens kv_heads head_dim"],
    starts: Int[Tensor, "sequences_and_end"],
    window: int,
) -> Float[Tensor, "tokens heads head_dim"]:
    """Attend within each sequence; `window` > 0 is the number of positions that a token sees.

    `starts` are the first token of each sequence, and the number of tokens.
    """
    functions = native.functions(queries.dtype)
    assert functions is not None
    result: Tensor = _Attend.apply(functions, queries, keys, values, starts, window)  # type: ignore[no-untyped-call]
    return result


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
        shape = _Shape(heads, keys.shape[1], dim, window)
        out = queries.new_empty(tokens, heads, dim)
        logs = torch.empty(tokens, heads)
        longest = int(starts.diff().max()) if len(starts) > 1 else 0
        padded = -(-longest // _QUERIES) * _QUERIES
        room = 2 * padded * dim + (_QUERIES + 6) * dim + 6 * padded
        threads = torch.get_num_threads()
        scratch = torch.empty(threads, room)
        functions["attend_packed"](
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(), queries.stride(0),
            starts.data_ptr(), len(starts) - 1, out.data_ptr(), logs.data_ptr(),
            scratch.data_ptr(), room, *shape, threads,
        )  # fmt: skip
        ctx.save_for_backward(queries, keys, values, logs, starts)
        ctx.functions, ctx.shape, ctx.padded = functions, shape, padded
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        queries, keys, values, logs, starts = ctx.saved_tensors
        shape, padded = ctx.shape, ctx.padded
        all_heads = shape.heads + 2 * shape.kv_heads
        grads = torch.empty(len(queries), all_heads, shape.dim, dtype=queries.dtype)
        parts = torch.split(grads, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        room = (5 * padded + 2 * _QUERIES + 6) * shape.dim + 2 * _QUERIES * padded
        threads = torch.get_num_threads()
        scratch = torch.empty(threads, room)
        grad_out = grad_out.contiguous()
        ctx.functions["attend_packed_backward"](
            queries.data_ptr(), keys.data_ptr(), values.data_ptr(), queries.stride(0),
            starts.data_ptr(), len(starts) - 1, logs.data_ptr(), grad_out.data_ptr(),
            *(part.data_ptr() for part in parts), grads.stride(0),
            scratch.data_ptr(), room, *shape, threads,
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
