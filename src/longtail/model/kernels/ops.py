"""The decoder's small operations behind a seam: PyTorch's everywhere, fused ones where they exist.

`TorchKernels` is the definition: any dtype, any device, differentiable. `NativeKernels` is the same
arithmetic in C for inference on a CPU, where a step of few tokens is otherwise ruled by the cost of
calling some thirty operations a layer; `triton_small.TritonKernels` is that of a GPU.
`kernel_choice.select_kernels` decides between them.
"""

import abc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.attention import causal_window_mask
from longtail.model.rope import Rotation

NATIVE_HEAD_DIMS = (16, 32, 64, 80, 96, 128)


class Residual(NamedTuple):
    """The residual stream after an addition, and its norm."""

    stream: Float[Tensor, "tokens hidden"]
    normed: Float[Tensor, "tokens hidden"]


class QueryKeyValue(NamedTuple):
    """Heads of one layer, rotated and ready to attend."""

    queries: Float[Tensor, "tokens heads head_dim"]
    keys: Float[Tensor, "tokens kv_heads head_dim"]
    values: Float[Tensor, "tokens kv_heads head_dim"]


class Places(NamedTuple):
    """Where each token of a step is kept in the cache, and what it sees of its row.

    A token sees the first `contexts` slots of its row, then those slots behind them whose bit is in
    `visible`. A token of a text sees all up to itself. Of a draft behind a context of 9 slots:

        slot        9   10   11            10 and 11 are children of 9
        contexts    9    9    9
        depths      1    2    2            as a text, they would be the 10th, 11th and 11th token
        visible   0b1 0b11 0b101
    """

    rows: Int[Tensor, "tokens"]
    slots: Int[Tensor, "tokens"]
    contexts: Int[Tensor, "tokens"]
    depths: Int[Tensor, "tokens"]
    """Tokens seen behind the context; windows count back from contexts + depths."""
    visible: Int[Tensor, "tokens"]
    """Bit i stands for slot contexts + i."""


def text_places(rows: Int[Tensor, "tokens"], slots: Int[Tensor, "tokens"]) -> Places:
    """Places of tokens that see every slot of their row up to their own."""
    none = torch.zeros_like(slots)
    return Places(rows, slots, slots + 1, none, none)


class Kernels(abc.ABC):
    """Small operations between the matrix products. Inputs may be overwritten by the result."""

    @abc.abstractmethod
    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which `rotate` wants cos and sin of a model that computes in `dtype`."""

    @abc.abstractmethod
    def add_norm(
        self,
        stream: Float[Tensor, "tokens hidden"],
        delta: Float[Tensor, "tokens hidden"] | None,
        weight: Float[Tensor, "hidden"],
        eps: float,
    ) -> Residual:
        """Add `delta`, if any, to the stream and take its RMS norm."""

    @abc.abstractmethod
    def rotate(
        self,
        qkv: Float[Tensor, "tokens all_heads head_dim"],
        num_heads: int,
        q_weight: Float[Tensor, "head_dim"] | None,
        k_weight: Float[Tensor, "head_dim"] | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Split queries, keys, values; norm queries and keys if weights are given; rotate them."""

    @abc.abstractmethod
    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """silu(first half) * second half."""

    @abc.abstractmethod
    def store_rows(
        self,
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        rows: Int[Tensor, "tokens"],
        slots: Int[Tensor, "tokens"],
    ) -> None:
        """Write each token's key and value at its (row, slot)."""

    @abc.abstractmethod
    def attend_rows(
        self,
        queries: Float[Tensor, "tokens heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        places: Places,
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Let each token see what its place says, at most `window` tokens back (0: all)."""


class TorchKernels(Kernels):
    """The definition, in PyTorch operations. Whoever does some of them faster overrides those."""

    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Rotate in the dtype the model computes in."""
        return dtype

    def add_norm(
        self,
        stream: Float[Tensor, "tokens hidden"],
        delta: Float[Tensor, "tokens hidden"] | None,
        weight: Float[Tensor, "hidden"],
        eps: float,
    ) -> Residual:
        """Add, then norm with statistics in float32 or better."""
        stream = stream if delta is None else stream + delta
        return Residual(stream, _rms_norm(stream, weight, eps))

    def rotate(
        self,
        qkv: Float[Tensor, "tokens all_heads head_dim"],
        num_heads: int,
        q_weight: Float[Tensor, "head_dim"] | None,
        k_weight: Float[Tensor, "head_dim"] | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Split, norm, rotate."""
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        queries, keys, values = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], 1)
        if q_weight is not None and k_weight is not None:
            queries = _rms_norm(queries, q_weight, eps)
            keys = _rms_norm(keys, k_weight, eps)
        return QueryKeyValue(rotation.apply(queries), rotation.apply(keys), values)

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """silu(first half) * second half."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def store_rows(
        self,
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        rows: Int[Tensor, "tokens"],
        slots: Int[Tensor, "tokens"],
    ) -> None:
        """Scatter into the rows."""
        flat = rows * key_rows.shape[1] + slots
        key_rows.flatten(0, 1).index_copy_(0, flat, keys)
        value_rows.flatten(0, 1).index_copy_(0, flat, values)

    def attend_rows(
        self,
        queries: Float[Tensor, "tokens heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        places: Places,
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """One call for each run of text and for each node of a draft; nothing is padded."""
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


def _text_runs(
    rows: Sequence[int], contexts: Sequence[int], visible: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Cut tokens into runs [start, end): consecutive text tokens of a row, or one node of a draft.

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
    # autocast hands over x in its own dtype, which the fused norm wants of the weight, too.
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


@final
class NativeKernels(Kernels):
    """The same operations from kernels.c: float32 or bfloat16, CPU, no gradients.

    Tensors are dense (as the decoder makes them); the stream and qkv are overwritten.
    """

    def __init__(self, functions: Mapping[str, Callable[..., None]]) -> None:
        self._add_norm, self._rotate = functions["add_norm"], functions["rotate"]
        self._swiglu = functions["swiglu"]
        self._store_kv, self._attend = functions["store_kv"], functions["attend_rows"]

    def rotation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Always float32: the kernels compute in it."""
        return torch.float32

    def add_norm(
        self,
        stream: Float[Tensor, "tokens hidden"],
        delta: Float[Tensor, "tokens hidden"] | None,
        weight: Float[Tensor, "hidden"],
        eps: float,
    ) -> Residual:
        """Add in place; one pass."""
        normed = torch.empty_like(stream)
        pending = None if delta is None else delta.data_ptr()
        self._add_norm(
            stream.data_ptr(), pending, weight.data_ptr(), normed.data_ptr(), *stream.shape, eps
        )
        return Residual(stream, normed)

    def rotate(
        self,
        qkv: Float[Tensor, "tokens all_heads head_dim"],
        num_heads: int,
        q_weight: Float[Tensor, "head_dim"] | None,
        k_weight: Float[Tensor, "head_dim"] | None,
        eps: float,
        rotation: Rotation,
    ) -> QueryKeyValue:
        """Norm and rotate in place; the parts are views."""
        tokens, all_heads, dim = qkv.shape
        kv_heads = (all_heads - num_heads) // 2
        self._rotate(
            qkv.data_ptr(),
            None if q_weight is None else q_weight.data_ptr(),
            None if k_weight is None else k_weight.data_ptr(),
            rotation.cos.data_ptr(),
            rotation.sin.data_ptr(),
            tokens,
            num_heads,
            kv_heads,
            dim,
            eps,
        )
        return QueryKeyValue(*torch.split(qkv, [num_heads, kv_heads, kv_heads], 1))

    def swiglu(self, gate_up: Float[Tensor, "tokens both"]) -> Float[Tensor, "tokens inner"]:
        """silu(first half) * second half."""
        tokens, both = gate_up.shape
        out = gate_up.new_empty(tokens, both // 2)
        self._swiglu(gate_up.data_ptr(), out.data_ptr(), tokens, both // 2)
        return out

    def store_rows(
        self,
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        rows: Int[Tensor, "tokens"],
        slots: Int[Tensor, "tokens"],
    ) -> None:
        """Copy into the rows."""
        tokens, kv_heads, dim = keys.shape
        self._store_kv(
            keys.data_ptr(),
            values.data_ptr(),
            keys.stride(0),
            key_rows.data_ptr(),
            value_rows.data_ptr(),
            key_rows.stride(0),
            rows.data_ptr(),
            slots.data_ptr(),
            tokens,
            kv_heads * dim,
        )

    def attend_rows(
        self,
        queries: Float[Tensor, "tokens heads head_dim"],
        key_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        value_rows: Float[Tensor, "rows row_len kv_heads head_dim"],
        places: Places,
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """All tokens in one call, each over its own length."""
        tokens, heads, dim = queries.shape
        out = queries.new_empty(tokens, heads, dim)
        self._attend(
            queries.data_ptr(),
            queries.stride(0),
            key_rows.data_ptr(),
            value_rows.data_ptr(),
            key_rows.stride(0),
            places.rows.data_ptr(),
            places.contexts.data_ptr(),
            places.depths.data_ptr(),
            places.visible.data_ptr(),
            out.data_ptr(),
            tokens,
            heads,
            key_rows.shape[2],
            dim,
            window,
            torch.get_num_threads(),
        )
        return out
