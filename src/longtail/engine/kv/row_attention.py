"""Attention of a flat batch over a contiguous KV cache, without a gather.

Every token reads its request's row up to its own position: decoded tokens, drafts and prompts in
one kernel call. The native kernel sums in the order of the positions, so a token's bits depend
neither on its neighbours nor on the chunks of its prompt (law 4).

    flat tokens   [ a | b | c n n | d d d d d d d d d ]     a, b decode, c verifies, d is prefilled
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.model.kernels.ops import CachedAttention, Kernels, Places
from longtail.speculation.tree import depths, visible_nodes
from longtail.system.device import to_device


@final
class RowAttention(CachedAttention):
    """Attention of the segments of one step."""

    def __init__(
        self, storage: Tensor, kernels: Kernels, segments: Sequence[Segment], rows: Sequence[int]
    ) -> None:
        super().__init__(storage, kernels, token_places(segments, rows, storage.device))


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
