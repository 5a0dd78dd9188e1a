"""Attention of a flat batch over a paged KV cache.

Segments of few tokens (decode, verification) come first, in tiles where a token's bits do not
depend on its batch. Long segments (prefill) use larger tiles with another order of summation, so
a token's bits depend on the chunks of its prompt; a batch-invariant cache uses small tiles for all.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.model.attention import Attention
from longtail.model.kernels.ops import Places
from longtail.model.kernels.pages import PageKernels, Pages, Tiles, page_addresses

FEW_TOKENS = 8
"""Maximum number of text tokens of a short segment; for longer ones larger tiles are faster."""


@final
class PagedAttention(Attention):
    """Stores the keys and values of a step in their pages, then attends."""

    def __init__(
        self,
        layers: Sequence[Pages],
        kernels: PageKernels,
        tables: Int[Tensor, "rows row_pages"],
        places: Places,
        few: Tiles | None,
        long: Tiles | None,
        num_few: int,
    ) -> None:
        self._layers, self._kernels, self._tables = layers, kernels, tables
        self._places, self._few, self._long, self._num_few = places, few, long, num_few
        self._addresses = page_addresses(tables, places, layers[0].keys.shape[1])

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Store, then attend with one call for short segments and one for long ones."""
        pages, cut = self._layers[layer], self._num_few
        self._kernels.store(keys, values, pages, self._addresses)
        parts = []
        for long, tiles, part in (
            (False, self._few, slice(0, cut)),
            (True, self._long, slice(cut, len(queries))),
        ):
            if tiles is not None:
                places = Places(*(each[part] for each in self._places))
                parts.append(
                    self._kernels.attend(
                        queries[part], pages, self._tables, places, tiles, window, long=long
                    )
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def cut_tiles(counts: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Cut consecutive runs of `counts` tokens into tiles of at most `size`; return firsts, counts.

    Example: cut_tiles([1, 5], 4) == ([0, 1, 5], [1, 4, 1])
    """
    firsts: list[int] = []
    sizes: list[int] = []
    start = 0
    for count in counts:
        firsts += range(start, start + count, size)
        sizes += [size] * (count // size) + ([count % size] if count % size else [])
        start += count
    return firsts, sizes


def count_few(segments: Sequence[Segment]) -> int:
    """Return the number of segments of few tokens, which come first."""
    few = [segment.num_tokens <= FEW_TOKENS for segment in segments]
    assert few == sorted(few, reverse=True), "segments of few tokens come first"
    return sum(few)
