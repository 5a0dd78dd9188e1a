"""Attention of a flat batch over a contiguous KV cache, without a gather.

Requests with few tokens in the step (decode, verification) go through one kernel that reads every
row at its own length. A long segment (a prefill chunk) is a matrix product worth a call of its own.

    flat tokens   [ a | b | c n n | d d d d d d d d d d ]      a, b, c decode, c with a draft:
                    few             many                       one attend_rows; d prefills
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
from longtail.model.kernels import Kernels, Places
from longtail.speculation.tree import depths, visible_nodes
from longtail.transfer import to_device

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
        self._places = token_places(segments, rows, layers[0].keys.device)
        self._long: list[LongSegment] = []
        self._num_few = start = 0
        for segment, row in zip(segments, rows, strict=True):
            end = start + segment.num_tokens + segment.draft.size
            if segment.num_tokens > FEW_TOKENS:
                assert not segment.draft.size, "a draft is verified behind few tokens"
                num_keys = segment.num_context + segment.num_tokens
                self._long.append(LongSegment(row=row, start=start, end=end, num_keys=num_keys))
            else:
                assert not self._long, "segments of few tokens come first"
                self._num_few = end
            start = end
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
        places, few = self._places, self._num_few
        self._kernels.store_rows(keys, values, key_rows, value_rows, places.rows, places.slots)
        if not self._long:
            return self._kernels.attend_rows(queries, key_rows, value_rows, places, window)
        attended = torch.empty_like(queries, memory_format=torch.contiguous_format)
        if few:
            attended[:few] = self._kernels.attend_rows(
                queries[:few], key_rows, value_rows, Places(*(x[:few] for x in places)), window
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


def token_places(segments: Sequence[Segment], rows: Sequence[int], device: torch.device) -> Places:
    """Say of every token and node where it is kept and what it sees; `rows` are the segments'.

    Nodes lie behind the text in the order of their numbers, whatever their depth.
    """
    token_rows: list[int] = []
    slots: list[int] = []
    contexts: list[int] = []
    deep: list[int] = []
    visible: list[int] = []
    for segment, row in zip(segments, rows, strict=True):
        start, draft = segment.num_context, segment.draft
        text = start + segment.num_tokens
        token_rows += [row] * (segment.num_tokens + draft.size)
        slots += range(start, text + draft.size)
        contexts += range(start + 1, text + 1)
        deep += [0] * segment.num_tokens
        visible += [0] * segment.num_tokens
        if draft.size:
            contexts += [text] * draft.size
            deep += depths(draft.parents)
            visible += visible_nodes(draft.parents)
    return Places(*to_device([token_rows, slots, contexts, deep, visible], device))
