"""Keys and values of the running requests, behind a seam.

`KVCache` is what the scheduler and the runner know: who owns room for how many tokens, and an
`Attention` for one step. `ContiguousKVCache` is the CPU layout: every request a contiguous row, so
attention reads views and gathers nothing. The GPU's layout is `paged_cache.PagedKVCache`.

    row 0  | request a : k k k k k k . . |
    row 1  | request b : k k . . . . . . |
    row 2  | free        . . . . . . . . |
    row 3  | request c : k k k k . . . . |
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from longtail.engine.batch import FlatBatch
from longtail.engine.kv.row_attention import LayerRows, RowAttention
from longtail.model.attention import Attention
from longtail.model.kernels.choice import select_kernels
from longtail.model.transformer import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Tokens of KV memory; free + owned = total at any time (law 5)."""

    free: int
    owned: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPath:
    """What stays of a draft that lies behind the text of a request.

    Example: KeptPath(request_id="b", num_tokens=10, path=(1, 3)): slots 10 and 12 of b hold the
    nodes 1 and 3, which are its tokens 10 and 11 now
    """

    request_id: str
    num_tokens: int
    """Of the text before the draft."""
    path: tuple[int, ...]
    """Accepted nodes, rising."""


class KVCache(abc.ABC):
    """Room for the KV of requests. A request unknown to the cache owns nothing."""

    @abc.abstractmethod
    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Own room for at least `num_tokens` tokens; False, with nothing changed, when short."""

    @abc.abstractmethod
    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Give a new target room for `num_tokens`, the first `num_shared` of them the source's.

        False, with nothing changed, when short.
        """

    @abc.abstractmethod
    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Make the source's room, cut to its first `num_tokens` tokens, the new target's."""

    @abc.abstractmethod
    def keep(self, paths: Sequence[KeptPath]) -> None:
        """Join accepted nodes to their texts, in order, and free the room of all other nodes."""

    @abc.abstractmethod
    def release(self, request_id: str) -> None:
        """Free everything the request owns."""

    @abc.abstractmethod
    def usage(self) -> KVUsage:
        """Count tokens."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Give memory back to the device, where it is missed; nobody owns anything."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Take back what `sleep` gave; nothing if awake."""

    @abc.abstractmethod
    def attention(self, batch: FlatBatch) -> Attention:
        """Attend as `batch` says: each token is stored, then sees its request up to itself."""


@final
class ContiguousKVCache(KVCache):
    """One row a request, in one tensor for all layers.

    Room is accounted in blocks of `block_size` tokens against `num_tokens`, like a paged cache; the
    rectangle behind it grows as its longest row does, and its memory is touched only where tokens
    are written.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_rows: int,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 32,
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_tokens // block_size
        self._free_blocks = self._num_blocks
        self._blocks: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_rows))[::-1]
        self._max_rows, self._max_len = max_rows, max_len
        self._kernels = select_kernels(dtype, device, config.head_dim)
        self._config, self._dtype, self._device = config, dtype, device
        self._storage = self._allocate(min(max_len, 8 * block_size))
        self._layers = _layers(self._storage)

    def _allocate(self, row_len: int) -> Shaped[Tensor, "layers 2 rows row_len kv_heads head_dim"]:
        """Make a zeroed rectangle; on a CPU its pages are committed when first written."""
        c = self._config
        shape = (c.num_layers, 2, self._max_rows, row_len, c.num_kv_heads, c.head_dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # calloc, unlike torch.zeros, does not write: a heavy-tailed batch never touches most of it.
        size = torch.empty((), dtype=self._dtype).element_size()
        flat = np.zeros(int(np.prod(shape)) * size, dtype=np.uint8)
        return torch.from_numpy(flat).view(self._dtype).view(shape)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Take blocks, and a row if the request has none."""
        owned = self._blocks.get(request_id, 0)
        missing = max(0, self._blocks_for(num_tokens) - owned)
        is_new = request_id not in self._rows
        if missing > self._free_blocks or (is_new and not self._free_rows):
            return False
        self._free_blocks -= missing
        self._blocks[request_id] = owned + missing
        if is_new:
            self._rows[request_id] = self._free_rows.pop()
        if num_tokens > self._storage.shape[3]:
            self._widen(num_tokens)
        return True

    def _widen(self, num_tokens: int) -> None:
        """Replace the rectangle by one at least half as long again, keeping every owned token."""
        old = self._storage
        wanted = max(num_tokens, old.shape[3] * 3 // 2)
        self._storage = self._allocate(
            min(self._max_len, self._blocks_for(wanted) * self._block_size)
        )
        for request_id, row in self._rows.items():
            held = min(self._blocks[request_id] * self._block_size, old.shape[3])
            self._storage[:, :, row, :held] = old[:, :, row, :held]
        self._layers = _layers(self._storage)

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Copy the tokens: in a contiguous layout a prefix cannot have two owners."""
        assert target_id not in self._rows, f"{target_id} already owns a row"
        assert num_shared <= num_tokens, "share into room not asked for"
        if not self.try_grow(target_id, num_tokens):
            return False
        source, target = self._rows[source_id], self._rows[target_id]
        self._storage[:, :, target, :num_shared] = self._storage[:, :, source, :num_shared]
        return True

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Rename the row; nothing is copied."""
        assert target_id not in self._rows, f"{target_id} already owns a row"
        row, owned = self._rows.pop(source_id), self._blocks.pop(source_id)
        kept = self._blocks_for(num_tokens)
        assert kept <= owned, "hand over more than is owned"
        self._rows[target_id], self._blocks[target_id] = row, kept
        self._free_blocks += owned - kept

    def keep(self, paths: Sequence[KeptPath]) -> None:
        """Move nodes that are not in their place, all at once; a chain is in its place."""
        moves = [
            (self._rows[kept.request_id], kept.num_tokens + node - 1, kept.num_tokens + i)
            for kept in paths
            for i, node in enumerate(kept.path)
            if node != i + 1
        ]
        if moves:  # read in full before anything is written
            rows, sources, targets = torch.tensor(moves, device=self._device).T
            self._storage[:, :, rows, targets] = self._storage[:, :, rows, sources]
        for kept in paths:
            blocks = self._blocks_for(kept.num_tokens + len(kept.path))
            self._free_blocks += self._blocks[kept.request_id] - blocks
            self._blocks[kept.request_id] = blocks

    def release(self, request_id: str) -> None:
        """Free the blocks and the row."""
        self._free_rows.append(self._rows.pop(request_id))
        self._free_blocks += self._blocks.pop(request_id)

    def usage(self) -> KVUsage:
        """Count blocks, in tokens."""
        owned = sum(self._blocks.values())
        size = self._block_size
        return KVUsage(
            free=self._free_blocks * size, owned=owned * size, total=self._num_blocks * size
        )

    def sleep(self) -> None:
        """Keep it: on a CPU it is only what tokens were written to."""

    def wake(self) -> None:
        """It never sleeps."""

    def attention(self, batch: FlatBatch) -> Attention:
        """Attend over views of the rows."""
        rows = [self._rows[segment.request_id] for segment in batch.segments]
        return RowAttention(self._layers, self._kernels, batch.segments, rows)


def _layers(storage: Tensor) -> list[LayerRows]:
    """View the rectangle layer by layer."""
    return [LayerRows(*layer.unbind(0)) for layer in storage.unbind(0)]
