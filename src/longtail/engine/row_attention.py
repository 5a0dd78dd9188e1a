"""Attention of a flat batch over a contiguous KV cache, without a gather.

Requests with few tokens in the step (decode) go through one kernel that reads every row at its own
length. A long segment (a prefill chunk) is a matrix product worth a call of its own.

    flat tokens   [ a | b | c | d d d d d d d d d d ]      a, b, c decode: one attend_rows
                    few         many                       d prefills: one product
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.model.attention import Attention, causal_window_mask
from longtail.model.kernels import Kernels

FEW_TOKENS = 8
"""Up to so many tokens of a request are attended one by one; beyond, a matrix product is faster."""


class LayerRows(NamedTuple):
    """What one layer has cached."""

    keys: Float[Tensor, "rows row_len kv_heads head_dim"]
    values: Float[Tensor, "rows row_len kv_heads head_dim"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongSegment:
    """The flat tokens [start, end) of one request, over the first `num_keys` keys of its row."""

    row: int
    start: int
    end: int
    num_keys: int


@final
class RowAttention(Attention):
    """Stores a step's keys and values, then attends; few-token segments come first."""

    def __init__(
        self,
        layers: Sequence[LayerRows],
        kernels: Kernels,
        segments: Sequence[Segment],
        rows: Sequence[int],
    ) -> None:
        self._layers, self._kernels = layers, kernels
        device = layers[0].keys.device
        token_rows: list[int] = []
        slots: list[int] = []
        self._long: list[LongSegment] = []
        self._num_few = 0
        for segment, row in zip(segments, rows, strict=True):
            start, num_keys = len(slots), segment.num_context + segment.num_tokens
            token_rows += [row] * segment.num_tokens
            slots += range(segment.num_context, num_keys)
            if segment.num_tokens > FEW_TOKENS:
                end = len(slots)
                self._long.append(LongSegment(row=row, start=start, end=end, num_keys=num_keys))
            else:
                assert not self._long, "segments of few tokens come first"
                self._num_few = len(slots)
        self._rows = torch.tensor(token_rows, device=device)
        self._slots = torch.tensor(slots, device=device)
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Store, then attend: the few-token segments in one call, the long ones one by one."""
        key_rows, value_rows = self._layers[layer]
        rows, slots, few = self._rows, self._slots, self._num_few
        self._kernels.store_rows(keys, values, key_rows, value_rows, rows, slots)
        if not self._long:
            return self._kernels.attend_rows(queries, key_rows, value_rows, rows, slots, window)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if few:
            attended[:few] = self._kernels.attend_rows(
                queries[:few], key_rows, value_rows, rows[:few], slots[:few], window
            )
        for part in self._long:
            attended[part.start : part.end] = self._attend_long(
                queries[part.start : part.end],
                key_rows[part.row, : part.num_keys],
                value_rows[part.row, : part.num_keys],
                window,
            )
        return attended

    def _attend_long(
        self,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "keys kv_heads head_dim"],
        values: Float[Tensor, "keys kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """The last tokens of one request over all its keys."""
        shape = (queries.shape[0], keys.shape[0], window)
        if shape not in self._masks:
            self._masks[shape] = causal_window_mask(*shape, queries.device)
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=self._masks[shape],
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return out[0].transpose(0, 1)
