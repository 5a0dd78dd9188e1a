"""The decoder's small operations: the reference, and the native implementation.

`Kernels` is the reference: any dtype, any device, differentiable. `NativeKernels` is the same
arithmetic in C for inference, where a step of few tokens would otherwise spend most of its time
calling some thirty operations per layer. `select_kernels` selects one.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.attention import Attention, Heads, KVHeads, causal_window_mask
from longtail.model.kernels import native
from longtail.model.rope import Rotation

NATIVE_HEAD_DIMS = (16, 32, 64, 80, 96, 128)

# Shapes of the kernels' tensors.
Hidden = Float[Tensor, "tokens hidden"]
NormWeight = Float[Tensor, "hidden"]
HeadWeight = Float[Tensor, "head_dim"]
AllHeads = Float[Tensor, "tokens all_heads head_dim"]
Rows = Float[Tensor, "rows row_len kv_heads head_dim"]
Indices = Int[Tensor, "tokens"]


class Residual(NamedTuple):
    """The residual stream after an addition, and its norm."""

    stream: Hidden
    normed: Hidden


class QueryKeyValue(NamedTuple):
    """Queries, keys and values of one layer, after the rotation."""

    queries: Heads
    keys: KVHeads
    values: KVHeads


class HeadNorms(NamedTuple):
    """Number of queries in a projection, and the norms of queries and keys, if there are any."""

    num_heads: int
    eps: float
    q_weight: HeadWeight | None = None
    k_weight: HeadWeight | None = None


class Places(NamedTuple):
    """Cache slot of each token of a step, and the slots of its row that it sees.

    A token sees the first `contexts` slots of its row, and of the slots after them those whose bit
    is set in `visible`. A text token sees all slots up to its own. A draft after 9 slots:

        slot        9   10   11            10 and 11 are children of 9
        contexts    9    9    9
        depths      1    2    2            as text they would be the 10th, 11th and 11th token
        visible   0b1 0b11 0b101
    """

    rows: Indices
    slots: Indices
    contexts: Indices
    depths: Indices
    """Number of tokens seen after the context; windows count back from contexts + depths."""
    visible: Indices
    """Bit i is slot contexts + i."""


def text_places(rows: Indices, slots: Indices) -> Places:
    """Return the places of text tokens, which see every slot of their row up to their own."""
    none = torch.zeros_like(slots)
    return Places(rows, slots, slots + 1, none, none)


class Kernels:
    """Small operations between the matrix products, in PyTorch's: the reference.

    Subclasses override those that they do faster; theirs may overwrite their inputs.
    """

    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of cos and sin for `rotate`, for a model that computes in `dtype`."""
        return dtype

    def attention(self, given: Attention, dtype: torch.dtype) -> Attention:
        """Return the attention of a pass with queries of `dtype`, faster where there is one."""
        return given

    def add_norm(
        self, stream: Hidden, delta: Hidden | None, weight: NormWeight, eps: float
    ) -> Residual:
        """Add `delta`, if any, to the stream and take its RMS norm."""
        stream = stream if delta is None else stream + delta
        return Residual(stream, _rms_norm(stream, weight, eps))

    def rotate(self, qkv: AllHeads, norms: HeadNorms, rotation: Rotation) -> QueryKeyValue:
        """Split queries, keys, values; norm queries and keys if weights are given; rotate them."""
        num_heads, eps, q_weight, k_weight = norms
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        queries, keys, values = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)
        if q_weight is not None and k_weight is not None:
            queries = _rms_norm(queries, q_weight, eps)
            keys = _rms_norm(keys, k_weight, eps)
        return QueryKeyValue(rotation.apply(queries), rotation.apply(keys), values)

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """Return silu(first half) * second half."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def store_rows(
        self, keys: KVHeads, values: KVHeads, key_rows: Rows, value_rows: Rows, places: Places
    ) -> None:
        """Store each token's key and value at its (row, slot)."""
        flat = places.rows * key_rows.shape[1] + places.slots
        key_rows.flatten(0, 1).index_copy_(0, flat, keys)
        value_rows.flatten(0, 1).index_copy_(0, flat, values)

    def attend_rows(
        self, queries: Heads, key_rows: Rows, value_rows: Rows, places: Places, window: int
    ) -> Heads:
        """Attend each token to its visible slots, at most `window` tokens back (0: all).

        One call per run of text tokens and per draft node, without padding.
        """
        rows, _, contexts, depths, visible = (each.tolist() for each in places)
        parts = []
        for start, end in _text_runs(rows, contexts, visible):
            context, nodes = contexts[end - 1], visible[start]
            first = min(max(0, contexts[start] + depths[start] - window), contexts[start])
            seen = [*range(first if window else 0, context)]
            seen += [context + i for i in range(nodes.bit_length()) if nodes >> i & 1]
            alone = end - start == 1
            out = F.scaled_dot_product_attention(
                queries[start:end].transpose(0, 1)[None],
                key_rows[rows[start], seen].transpose(0, 1)[None],
                value_rows[rows[start], seen].transpose(0, 1)[None],
                attn_mask=None
                if alone
                else causal_window_mask(end - start, len(seen), window, queries.device),
                enable_gqa=queries.shape[1] != key_rows.shape[2],
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


class CachedAttention(Attention):
    """Attention over rows of a contiguous cache; tokens store their keys and values first.

    decoder.c runs all layers of a model with it in one call.
    """

    def __init__(
        self,
        storage: Float[Tensor, "layers 2 rows row_len kv_heads head_dim"],
        kernels: Kernels,
        places: Places,
    ) -> None:
        self.storage, self.places = storage, places
        self._kernels = kernels

    def attend(
        self, layer: int, queries: Heads, keys: KVHeads, values: KVHeads, window: int
    ) -> Heads:
        """Store and attend with one call each."""
        key_rows, value_rows = self.storage[layer]
        self._kernels.store_rows(keys, values, key_rows, value_rows, self.places)
        return self._kernels.attend_rows(queries, key_rows, value_rows, self.places, window)


def _text_runs(
    rows: Sequence[int], contexts: Sequence[int], visible: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Cut tokens into runs [start, end): consecutive text tokens of a row, or one draft node.

    Example: rows 0 0 0 1, contexts 5 6 6 9, visible 0 0 1 0 give (0, 2), (2, 3), (3, 4)
    """
    cuts = [
        at
        for at in range(1, len(rows))
        if visible[at - 1]
        or visible[at]
        or (rows[at], contexts[at]) != (rows[at - 1], contexts[at - 1] + 1)
    ]
    return itertools.pairwise([0, *cuts, len(rows)])


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Under autocast x has its dtype; the fused norm needs the weight in the same one.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@final
class NativeKernels(Kernels):
    """Operations of kernels.c: float32 or bfloat16 on a CPU, without gradients.

    Tensors are dense; the stream and qkv are overwritten.
    """

    def __init__(self, functions: Mapping[str, Callable[..., None]]) -> None:
        self._add_norm, self._rotate = functions["add_norm"], functions["rotate"]
        self._swiglu = functions["swiglu"]
        self._store_kv, self._attend = functions["store_kv"], functions["attend_rows"]

    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32, in which the kernels compute."""
        return torch.float32

    def add_norm(
        self, stream: Hidden, delta: Hidden | None, weight: NormWeight, eps: float
    ) -> Residual:
        """Add in place and norm, in one pass."""
        normed = torch.empty_like(stream)
        self._add_norm(stream, delta, weight, normed, *stream.shape, eps)
        return Residual(stream, normed)

    def rotate(self, qkv: AllHeads, norms: HeadNorms, rotation: Rotation) -> QueryKeyValue:
        """Norm and rotate in place; the results are views."""
        num_heads, eps, *weights = norms
        tokens, all_heads, dim = qkv.shape
        kv_heads = (all_heads - num_heads) // 2
        angles, sizes = (rotation.cos, rotation.sin), (tokens, num_heads, kv_heads, dim)
        self._rotate(qkv, *weights, *angles, *sizes, eps)
        return QueryKeyValue(*torch.split(qkv, [num_heads, kv_heads, kv_heads], 1))

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """Return silu(first half) * second half."""
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        self._swiglu(gate_up, out, tokens, both // 2, torch.get_num_threads())
        return out

    def store_rows(
        self, keys: KVHeads, values: KVHeads, key_rows: Rows, value_rows: Rows, places: Places
    ) -> None:
        """Copy into the rows."""
        tokens, kv_heads, dim = keys.shape
        self._store_kv(
            keys, values, keys.stride(0), key_rows, value_rows, key_rows.stride(0), places.rows,
            places.slots, tokens, kv_heads * dim,
        )  # fmt: skip

    def attend_rows(
        self, queries: Heads, key_rows: Rows, value_rows: Rows, places: Places, window: int
    ) -> Heads:
        """Attend all tokens in one call, each over its own length."""
        tokens, heads, dim = queries.shape
        out = queries.new_empty(tokens, heads, dim)
        self._attend(
            queries, queries.stride(0), key_rows, value_rows, key_rows.stride(0), places.rows,
            places.contexts, places.depths, places.visible, out, tokens, heads, key_rows.shape[2],
            dim, window, torch.get_num_threads(),
        )  # fmt: skip
        return out


def select_kernels(dtype: torch.dtype, head_dim: int) -> Kernels:
    """Return the kernels for inference; native ones are built for two dtypes and some heads."""
    functions = native.functions(dtype) if head_dim in NATIVE_HEAD_DIMS else None
    return Kernels() if functions is None else NativeKernels(functions)
