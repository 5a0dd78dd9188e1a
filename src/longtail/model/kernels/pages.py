"""Attention over a paged KV cache: the interface and its reference implementation.

A page holds the keys (or values) of consecutive tokens of one request; a table lists the pages of a
request in order. The reference gathers them and never waits for the device.

    table   row 0: 5 2 .        slot s of row 0 lies in page 5 for s < page_size, then in page 2
"""

import abc
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.model.attention import Heads, KVHeads
from longtail.model.kernels.ops import Indices, Places
from longtail.speculation.tree import MAX_NODES


class Pages(NamedTuple):
    """Cached keys and values of one layer."""

    keys: Float[Tensor, "pages page_size kv_heads head_dim"]
    values: Float[Tensor, "pages page_size kv_heads head_dim"]


class Tiles(NamedTuple):
    """Runs of consecutive tokens of one request that are attended together; size 0 is padding.

    Example: firsts 0 1 5, sizes 1 4 0: one token, four tokens of another request, and padding
    """

    firsts: Int[Tensor, "tiles"]
    sizes: Int[Tensor, "tiles"]


class PageKernels(abc.ABC):
    """Stores into pages, and attends to the slots that `Places` gives for each token."""

    @abc.abstractmethod
    def tile_size(self, group: int, *, long: bool) -> int:
        """Return the maximum number of tokens of a tile if `group` query heads share a key head.

        `long` tiles hold text without drafts: their tokens see every slot up to their own.
        """

    @abc.abstractmethod
    def store(self, keys: KVHeads, values: KVHeads, pages: Pages, addresses: Indices) -> None:
        """Write each token's key and value at its address (`page_addresses`)."""

    @abc.abstractmethod
    def attend(
        self,
        queries: Heads,
        pages: Pages,
        tables: Int[Tensor, "rows row_pages"],
        places: Places,
        tiles: Tiles,
        window: int,
        *,
        long: bool,
    ) -> Heads:
        """Attend each token to its visible slots, at most `window` tokens back (0: all)."""


@final
class TorchPageKernels(PageKernels):
    """The reference implementation, for any dtype and device: gathers a row for every token."""

    def tile_size(self, group: int, *, long: bool) -> int:
        """Return 1."""
        return 1

    def store(self, keys: KVHeads, values: KVHeads, pages: Pages, addresses: Indices) -> None:
        """Scatter into the pages."""
        for kept, new in zip(pages, (keys, values), strict=True):
            kept.flatten(0, 1).index_copy_(0, addresses, new)

    def attend(
        self,
        queries: Heads,
        pages: Pages,
        tables: Int[Tensor, "rows row_pages"],
        places: Places,
        tiles: Tiles,
        window: int,
        *,
        long: bool,
    ) -> Heads:
        """Gather, mask and attend."""
        keys, values = (kept[tables[places.rows]].flatten(1, 2) for kept in pages)
        seen = _seen(places, keys.shape[1], window)
        # Unwritten slots may hold NaN, which a weight of 0 would not hide.
        keys, values = (x.masked_fill(~seen[:, :, None, None], 0.0) for x in (keys, values))
        grouped = queries.view(len(queries), keys.shape[2], -1, queries.shape[2])
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=seen[:, None, None]
        )
        return out.flatten(1, 2)


def _seen(places: Places, num_slots: int, window: int) -> Bool[Tensor, "tokens slots"]:
    """Return the mask of the slots of its row that each token sees."""
    slots = torch.arange(num_slots, device=places.slots.device)
    context, depth = places.contexts[:, None], places.depths[:, None]
    behind = slots - context
    text = behind < 0
    if window:
        text = text & (slots >= context + depth - window)
    nodes = (behind >= 0) & (places.visible[:, None] >> behind.clamp(0, MAX_NODES) & 1).bool()
    return text | nodes


def page_addresses(
    tables: Int[Tensor, "rows row_pages"], places: Places, page_size: int
) -> Indices:
    """Return the index of each token's slot among the slots of all pages."""
    page = tables[places.rows, places.slots // page_size]
    return page * page_size + places.slots % page_size
