"""The decoder's small operations on a GPU: PyTorch's, except for a drafter's cache.

A drafter's window is a row of a contiguous cache. Each row is one page, so the page kernels store
and attend. Nothing waits for the device, so a whole draft is launched without synchronising.
"""

import torch

from longtail.model.attention import Heads, KVHeads
from longtail.model.kernels.ops import Indices, Places, Rows, TorchKernels
from longtail.model.kernels.pages import PageKernels, Pages, Tiles


class GpuKernels(TorchKernels):
    """Kernels without gradients, for the dtypes of the page kernels."""

    def __init__(self, pages: PageKernels) -> None:
        self._pages = pages

    def store_rows(
        self,
        keys: KVHeads,
        values: KVHeads,
        key_rows: Rows,
        value_rows: Rows,
        rows: Indices,
        slots: Indices,
    ) -> None:
        """Store into pages of one row each."""
        addresses = rows * key_rows.shape[1] + slots
        self._pages.store(keys, values, Pages(key_rows, value_rows), addresses)

    def attend_rows(
        self, queries: Heads, key_rows: Rows, value_rows: Rows, places: Places, window: int
    ) -> Heads:
        """Attend over pages of one row each, in tiles of one token."""
        device = queries.device
        tables = torch.arange(len(key_rows), dtype=torch.int32, device=device)[:, None]
        tokens = torch.arange(len(queries), device=device)
        tiles = Tiles(tokens, torch.ones_like(tokens))
        pages = Pages(key_rows, value_rows)
        return self._pages.attend(queries, pages, tables, places, tiles, window, long=False)
