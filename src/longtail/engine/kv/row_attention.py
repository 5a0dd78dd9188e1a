"""Attention of a flat batch over a contiguous KV cache, without a gather.

Every token reads its request's row up to its own position: decoded tokens, drafts and prompts in
one kernel call. The native kernel sums in the order of the positions, so a token's bits depend
neither on its neighbours nor on the chunks of its prompt (law 4).

    flat tokens   [ a | b | c n n | d d d d d d d d d ]     a, b decode, c verifies, d is prefilled
"""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.model.attention import Attention
from longtail.model.kernels.ops import Kernels, Places
from longtail.speculation.tree import depths, visible_nodes
from longtail.system.transfer import to_device


class LayerRows(NamedTuple):
    """Cached keys and values of one layer."""

    keys: Float[Tensor, "rows row_len kv_heads head_dim"]
    values: Float[Tensor, "rows row_len kv_heads head_dim"]


@final
class RowAttention(Attention):
    """Stores the keys and values of a step, then attends."""

    def __init__(
        self,
        layers: Sequence[LayerRows],
        kernels: Kernels,
        segments: Sequence[Segment],
        rows: Sequence[int],
    ) -> None:
        self._layers, self._kernels = layers, kernels
        self._places = token_places(segments, rows, layers[0].keys.device)

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Store and attend with one call each for all segments."""
        key_rows, value_rows = self._layers[layer]
        places = self._places
        self._kernels.store_rows(keys, values, key_rows, value_rows, places.rows, places.slots)
        return self._kernels.attend_rows(queries, key_rows, value_rows, places, window)


def token_places(segments: Sequence[Segment], rows: Sequence[int], device: torch.device) -> Places:
    """Return slot and visibility of every token and node; `rows` are those of the segments.

    Nodes follow the text in the order of their numbers, not of their depths.
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
