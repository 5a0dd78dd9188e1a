"""The paged KV cache of a GPU: blocks that any request can own.

One tensor holds all blocks of all layers; `blocks.BlockPool` assigns them. The last block belongs
to no request: padding writes into it.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.engine.batch import FlatBatch, Segment
from longtail.engine.kv.blocks import BlockPool
from longtail.engine.kv.cache import KeptPath, KVCache, KVUsage, token_places
from longtail.model.attention import Attention
from longtail.model.kernels.ops import Places
from longtail.model.kernels.pages import PageKernels, Pages, Tiles, page_addresses
from longtail.model.transformer import ModelConfig

BLOCK_SIZE = 64
"""Tokens per block: 16 KB of a key head of 128 dims in bfloat16, read in one piece."""


@final
class PagedKVCache(KVCache):
    """KV cache of blocks that are shared by reference and copied before they are written."""

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
        """Bytes of all blocks, when awake."""
        self._layers = [Pages(*layer.unbind(0)) for layer in self._storage.unbind(0)]
        self._pool = BlockPool(
            num_blocks=num_blocks,
            block_size=block_size,
            max_owners=max_rows,
            max_blocks=-(-max_len // block_size),
            copy=self._copy,
        )
        # The last row is the padding's: it holds only the block without owner.
        self._tables = torch.full(
            (max_rows + 1, self._pool.table.shape[1]), num_blocks, dtype=torch.int32, device=device
        )
        self._known_changes = 0

    def _copy(self, source: int, target: int) -> None:
        self._storage[:, :, target] = self._storage[:, :, source]

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Reserve blocks; copy a shared one in which the request continues."""
        return self._pool.try_grow(request_id, num_tokens)

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Share full blocks; copy the one in which the target continues."""
        return self._pool.try_share(
            source_id, target_id, num_shared=num_shared, num_tokens=num_tokens
        )

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Rename the owner without a copy."""
        self._pool.hand_over(source_id, target_id, num_tokens)

    def keep(self, paths: Sequence[KeptPath]) -> None:
        """Move accepted nodes to their slots; an accepted chain is in its slots already."""
        moves = [
            (self._pool.row(kept.request_id), kept.num_tokens + node - 1, kept.num_tokens + i)
            for kept in paths
            for i, node in enumerate(kept.path)
            if node != i + 1
        ]
        if moves:  # reads everything before it writes
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
        """Free the blocks that no other request owns."""
        self._pool.release(request_id)

    def usage(self) -> KVUsage:
        """Return the blocks, in tokens; a shared block counts once."""
        return self._pool.usage()

    def sleep(self, *, fully: bool = False) -> None:
        """Free the memory of the blocks while nothing is generated."""
        assert not self.usage().owned, "a request would lose its keys and values"
        self._storage.untyped_storage().resize_(0)
        _return_unused(self._device)  # at once, before a small allocation splits it

    def wake(self) -> None:
        """Allocate the memory again, possibly at another `address`."""
        if self._storage.untyped_storage().nbytes() < self.num_bytes:
            _return_unused(self._device)
            self._storage.untyped_storage().resize_(self.num_bytes)
            self._storage.zero_()

    @property
    def address(self) -> int:
        """Address of the blocks, which captured passes depend on."""
        return self._storage.data_ptr()

    def attention(self, batch: FlatBatch) -> Attention:
        """Return attention through the block table."""
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
        """Return whether all segments have few tokens."""
        return count_few(batch.segments) == len(batch.segments)

    def numbers(self, batch: FlatBatch) -> list[Int[Tensor, "tokens"]]:
        """Return the inputs of `attention_at` for each token of a batch of short segments."""
        counts = [segment.num_tokens + segment.draft.size for segment in batch.segments]
        tiles = cut_tiles(counts, self._kernels.tile_size(self._group, long=False))
        missing = [0] * (sum(counts) - len(tiles[0]))
        filled = torch.tensor([each + missing for each in tiles], device=self._device)
        return [*self._places(batch), *filled]

    def padding(self) -> list[int]:
        """Return the inputs of `attention_at` for a padding token."""
        return [len(self._tables) - 1, 0, 0, 0, 0, 0, 0]

    def attention_at(self, numbers: Sequence[Int[Tensor, "tokens"]]) -> Attention:
        """Return attention with static inputs; it reads the table when the pass runs."""
        places, tiles = Places(*numbers[:5]), Tiles(*numbers[5:])
        return PagedAttention(
            self._layers, self._kernels, self._tables, places, tiles, None, len(numbers[0])
        )

    def tables(self) -> Int[Tensor, "rows row_pages"]:
        """Return the current table on the device, at a fixed address."""
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
    """Return unused memory of PyTorch to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
