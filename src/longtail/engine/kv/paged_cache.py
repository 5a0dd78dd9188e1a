"""Keys and values in blocks that any request may own: the KV cache of a GPU.

One tensor holds all blocks of all layers; who owns which is `blocks.BlockPool`'s business. The last
block is nobody's: what padding writes goes there.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from longtail.engine.batch import FlatBatch
from longtail.engine.kv.blocks import BlockPool
from longtail.engine.kv.cache import KeptPath, KVCache, KVUsage
from longtail.engine.kv.paged_attention import PagedAttention, count_few, cut_tiles
from longtail.engine.kv.row_attention import token_places
from longtail.model.attention import Attention
from longtail.model.kernels.ops import Places
from longtail.model.kernels.pages import PageKernels, Pages, Tiles
from longtail.model.transformer import ModelConfig

BLOCK_SIZE = 64
"""Tokens: 16 KB of a key head of 128 dims in bfloat16, read in one piece."""


@final
class PagedKVCache(KVCache):
    """Blocks shared by reference, copied before they are written."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: PageKernels,
        block_size: int = BLOCK_SIZE,
        batch_invariant: bool = False,
    ) -> None:
        self._block_size, self._device, self._kernels = block_size, device, kernels
        self._batch_invariant = batch_invariant
        self._group = config.num_heads // config.num_kv_heads
        num_blocks = num_tokens // block_size
        shape = (num_blocks + 1, block_size, config.num_kv_heads, config.head_dim)
        self._storage = torch.zeros(config.num_layers, 2, *shape, dtype=dtype, device=device)
        self.num_bytes = self._storage.untyped_storage().nbytes()
        """Of all blocks, when awake."""
        self._layers = [Pages(*layer.unbind(0)) for layer in self._storage.unbind(0)]
        self._pool = BlockPool(
            num_blocks=num_blocks,
            block_size=block_size,
            max_owners=max_rows,
            max_blocks=-(-max_len // block_size),
            copy=self._copy,
        )
        # The last row is padding's: the block that is nobody's, all along.
        self._tables = torch.full(
            (max_rows + 1, self._pool.table.shape[1]), num_blocks, dtype=torch.int32, device=device
        )
        self._known_changes = 0

    def _copy(self, source: int, target: int) -> None:
        self._storage[:, :, target] = self._storage[:, :, source]

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Take blocks, and copy the one that the request goes on in if it is another's, too."""
        return self._pool.try_grow(request_id, num_tokens)

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Share full blocks; the one in which the target goes on is copied."""
        return self._pool.try_share(
            source_id, target_id, num_shared=num_shared, num_tokens=num_tokens
        )

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Rename the owner; nothing is copied."""
        self._pool.hand_over(source_id, target_id, num_tokens)

    def keep(self, paths: Sequence[KeptPath]) -> None:
        """Move nodes that are not in their place, all at once; a chain is in its place."""
        moves = [
            (self._pool.row(kept.request_id), kept.num_tokens + node - 1, kept.num_tokens + i)
            for kept in paths
            for i, node in enumerate(kept.path)
            if node != i + 1
        ]
        if moves:  # read in full before anything is written
            rows, *slots = np.array(moves).T
            sources, targets = (torch.from_numpy(self._address(rows, each)) for each in slots)
            flat = self._storage.flatten(2, 3)
            flat[:, :, targets.to(self._device)] = flat[:, :, sources.to(self._device)]
        for kept in paths:
            self._pool.cut(kept.request_id, kept.num_tokens + len(kept.path))

    def _address(self, rows: np.ndarray, slots: np.ndarray) -> np.ndarray:
        blocks = self._pool.table[rows, slots // self._block_size].astype(np.int64)
        return blocks * self._block_size + slots % self._block_size

    def release(self, request_id: str) -> None:
        """Free what nobody else owns."""
        self._pool.release(request_id)

    def usage(self) -> KVUsage:
        """Count blocks, in tokens; a shared one once."""
        return self._pool.usage()

    def sleep(self) -> None:
        """Give the blocks' memory to whoever works while nothing is generated."""
        assert not self.usage().owned, "a request would lose its keys and values"
        self._storage.untyped_storage().resize_(0)
        _return_unused(self._device)  # in one piece, before something small settles in it

    def wake(self) -> None:
        """Have the memory again, perhaps elsewhere: `address` tells."""
        if self._storage.untyped_storage().nbytes() < self.num_bytes:
            _return_unused(self._device)
            self._storage.untyped_storage().resize_(self.num_bytes)
            self._storage.zero_()

    @property
    def address(self) -> int:
        """Where the blocks lie; captured passes know no other place."""
        return self._storage.data_ptr()

    def attention(self, batch: FlatBatch) -> Attention:
        """Attend through the table."""
        segments = batch.segments
        few = len(segments) if self._batch_invariant else count_few(segments)
        counts = [segment.num_tokens + segment.draft.size for segment in segments]
        return PagedAttention(
            self._layers,
            self._kernels,
            self.tables(),
            self._places(batch),
            self._tiles(counts[:few], long=False),
            self._tiles(counts[few:], long=True),
            sum(counts[:few]),
        )

    def is_short(self, batch: FlatBatch) -> bool:
        """Tell whether all segments are of few tokens."""
        return count_few(batch.segments) == len(batch.segments)

    def numbers(self, batch: FlatBatch) -> list[Int[Tensor, "tokens"]]:
        """What `attention_at` wants to know of each token of a batch of short segments."""
        counts = [segment.num_tokens + segment.draft.size for segment in batch.segments]
        tiles = cut_tiles(counts, self._kernels.tile_size(self._group, long=False))
        missing = [0] * (sum(counts) - len(tiles[0]))
        filled = torch.tensor([each + missing for each in tiles], device=self._device)
        return [*self._places(batch), *filled]

    def padding(self) -> list[int]:
        """Return the numbers of a token that is nobody's."""
        return [len(self._tables) - 1, 0, 0, 0, 0, 0, 0]

    def attention_at(self, numbers: Sequence[Int[Tensor, "tokens"]]) -> Attention:
        """Attend as static tensors say, through the table as it is when the pass runs."""
        places, tiles = Places(*numbers[:5]), Tiles(*numbers[5:])
        return PagedAttention(
            self._layers, self._kernels, self._tables, places, tiles, None, len(numbers[0])
        )

    def tables(self) -> Int[Tensor, "rows row_pages"]:
        """The table on the device, as it is now, in its place."""
        if self._pool.changes != self._known_changes:
            self._tables[:-1].copy_(torch.from_numpy(self._pool.table))
            self._known_changes = self._pool.changes
        return self._tables

    def _places(self, batch: FlatBatch) -> Places:
        rows = [self._pool.row(segment.request_id) for segment in batch.segments]
        return token_places(batch.segments, rows, self._device)

    def _tiles(self, counts: Sequence[int], *, long: bool) -> Tiles | None:
        if not counts:
            return None
        tiles = cut_tiles(counts, self._kernels.tile_size(self._group, long=long))
        return Tiles(*torch.tensor(tiles, device=self._device))


def _return_unused(device: torch.device) -> None:
    """Give the device what PyTorch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
