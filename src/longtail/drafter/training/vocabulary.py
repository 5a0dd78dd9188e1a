"""Renewal of a reduced draft vocabulary, as the policy's texts move.

A drafter can only propose tokens of its vocabulary, so tokens outside it are never accepted. The
head is the target's own rows, so other ids need no training: their rows are gathered anew.
"""

import torch
from jaxtyping import Int
from torch import Tensor

MIN_RISE = 0.005
"""Rise of the share of covered tokens from which a vocabulary is renewed."""


def coverage(ids: Int[Tensor, "draft"], counts: Int[Tensor, "vocab"]) -> float:
    """Return the share of counted tokens that are in a vocabulary; 1 without any token."""
    total = int(counts.sum())
    inside = ids[ids < len(counts)]
    return int(counts[inside].sum()) / total if total else 1.0


def renewed_ids(
    ids: Int[Tensor, "draft"], counts: Int[Tensor, "vocab"]
) -> Int[Tensor, "draft"] | None:
    """Return the commonest tokens, ascending, if they cover clearly more than `ids`; else None.

    `counts[token]` is the number of occurrences in recent texts; tokens beyond its end have none.
    Among tokens that are equally common, those of `ids` are kept.

    Example: renewed_ids([1, 2], counts=[0, 0, 5, 3]) is [2, 3], which covers 8 of 8 tokens, not 5
    """
    if coverage(ids, counts) > 1.0 - MIN_RISE:
        return None
    size = max(len(counts), int(ids.max()) + 1)
    rank = torch.zeros(size, dtype=torch.int64)
    rank[: len(counts)] = 2 * counts
    rank[ids] += 1
    commonest = rank.argsort(descending=True, stable=True)[: len(ids)].sort().values
    if coverage(commonest, counts) - coverage(ids, counts) < MIN_RISE:
        return None
    return commonest.to(ids.dtype)
