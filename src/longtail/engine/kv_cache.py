"""The KV cache of running requests: a contiguous row each, which attention reads in place.

Scheduler and runner ask it for the tokens reserved for each request, and for the `Attention` of one
step.

    row 0  | request a : k k k k k k . . |
    row 1  | request b : k k . . . . . . |
    row 2  | free        . . . . . . . . |
    row 3  | request c : k k k k . . . . |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.request import EngineLimits
from longtail.model.attention import Attention
from longtail.model.kernels.ops import CachedAttention, Places, select_kernels
from longtail.model.transformer import ModelConfig, Transformer
from longtail.speculation.tree import MAX_NODES, depths, visible_nodes

_BLOCK_SIZE = 32


def token_places(scheduled: Sequence[Scheduled], rows: Sequence[int]) -> Places:
    """Return slot and visibility of every token and node; `rows` are those of the requests.

    Nodes follow the sequence in the order of their numbers, not of their depths.
    """
    token_rows: list[int] = []
    slots: list[int] = []
    contexts: list[int] = []
    deep: list[int] = []
    visible: list[int] = []
    for each, row in zip(scheduled, rows, strict=True):
        start, draft = each.active.num_computed, each.draft
        end = start + each.num_tokens
        token_rows += [row] * (each.num_tokens + draft.size)
        slots += range(start, end + draft.size)
        contexts += range(start + 1, end + 1)
        deep += [0] * each.num_tokens
        visible += [0] * each.num_tokens
        if draft.size:
            contexts += [end] * draft.size
            deep += depths(draft.parents)
            visible += visible_nodes(draft.parents)
    return Places(*torch.tensor([token_rows, slots, contexts, deep, visible]))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Tokens of KV memory; free + owned = total at any time (law 5)."""

    free: int
    owned: int
    total: int


@final
class KVCache:
    """One row per request, in one tensor for all layers; an unknown request owns nothing.

    Tokens are accounted in blocks of `block_size`. The tensor grows with its longest row and with
    the number of rows in use, and its memory is touched only where tokens are written.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_tokens: int,
        max_rows: int,
        max_len: int,
        dtype: torch.dtype,
        block_size: int = _BLOCK_SIZE,
    ) -> None:
        self._block_size = block_size
        self._num_blocks = num_tokens // block_size
        self._free_blocks = self._num_blocks
        self._blocks: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_rows))[::-1]
        self._max_rows, self._max_len = max_rows, max_len
        self._kernels = select_kernels(dtype, config.head_dim)
        self._config, self._dtype = config, dtype
        self._storage = self._allocate(min(max_rows, 8), min(max_len, 8 * block_size))

    def _allocate(
        self, num_rows: int, row_len: int
    ) -> Shaped[Tensor, "layers 2 rows row_len kv_heads head_dim"]:
        """Return a zeroed tensor, whose memory is committed when it is first written."""
        c = self._config
        shape = (c.num_layers, 2, num_rows, row_len, c.num_kv_heads, c.head_dim)
        # calloc, unlike torch.zeros, writes no pages, and most of them are never used.
        size = torch.empty((), dtype=self._dtype).element_size()
        flat = np.zeros(int(np.prod(shape)) * size, dtype=np.uint8)
        return torch.from_numpy(flat).view(self._dtype).view(shape)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Reserve at least `num_tokens` tokens; False, without any change, if too few are free."""
        owned = self._blocks.get(request_id, 0)
        missing = max(0, self._blocks_for(num_tokens) - owned)
        is_new = request_id not in self._rows
        if missing > self._free_blocks or (is_new and not self._free_rows):
            return False
        self._free_blocks -= missing
        self._blocks[request_id] = owned + missing
        if is_new:
            self._rows[request_id] = self._free_rows.pop()
        num_rows, row_len = self._storage.shape[2:4]
        if self._rows[request_id] >= num_rows or num_tokens > row_len:
            self._enlarge(self._rows[request_id] + 1, num_tokens)
        return True

    def _enlarge(self, num_rows: int, num_tokens: int) -> None:
        """Replace the tensor by one with more or longer rows; copy owned tokens."""
        old, (rows, row_len) = self._storage, self._storage.shape[2:4]
        if num_rows > rows:
            num_rows = min(self._max_rows, max(num_rows, 2 * rows))
        if num_tokens > row_len:
            wanted = max(num_tokens, row_len * 3 // 2)
            num_tokens = min(self._max_len, self._blocks_for(wanted) * self._block_size)
        self._storage = self._allocate(max(num_rows, rows), max(num_tokens, row_len))
        for request_id, row in self._rows.items():
            if row < rows:
                held = min(self._blocks[request_id] * self._block_size, row_len)
                self._storage[:, :, row, :held] = old[:, :, row, :held]

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Reserve `num_tokens` for a new target, the first `num_shared` copied from the source.

        False, without any change, if too few are free.
        """
        assert target_id not in self._rows, f"{target_id} already owns a row"
        assert num_shared <= num_tokens, "more tokens shared than reserved"
        if not self.try_grow(target_id, num_tokens):
            return False
        source, target = self._rows[source_id], self._rows[target_id]
        self._storage[:, :, target, :num_shared] = self._storage[:, :, source, :num_shared]
        return True

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Give the source's first `num_tokens` tokens to a new target, and free the others."""
        assert target_id not in self._rows, f"{target_id} already owns a row"
        row, owned = self._rows.pop(source_id), self._blocks.pop(source_id)
        kept = self._blocks_for(num_tokens)
        assert kept <= owned, "more tokens handed over than owned"
        self._rows[target_id], self._blocks[target_id] = row, kept
        self._free_blocks += owned - kept

    def keep(self, paths: Mapping[str, tuple[int, Sequence[int]]]) -> None:
        """Append accepted nodes to their sequences, in order, and free all other nodes.

        `paths` has, by request, the tokens of its sequence before the draft, and accepted nodes in
        rising order. They move to their slots; those of an accepted chain are there already.

        Example: {"b": (10, [1, 3])}: slots 10 and 12 of b hold what are its tokens 10 and 11 now
        """
        moves = [
            (self._rows[request_id], num_tokens + node - 1, num_tokens + i)
            for request_id, (num_tokens, path) in paths.items()
            for i, node in enumerate(path)
            if node != i + 1
        ]
        if moves:  # reads everything before it writes
            rows, sources, targets = torch.tensor(moves).T
            self._storage[:, :, rows, targets] = self._storage[:, :, rows, sources]
        for request_id, (num_tokens, path) in paths.items():
            blocks = self._blocks_for(num_tokens + len(path))
            self._free_blocks += self._blocks[request_id] - blocks
            self._blocks[request_id] = blocks

    def release(self, request_id: str) -> None:
        """Free all tokens of the request."""
        self._free_rows.append(self._rows.pop(request_id))
        self._free_blocks += self._blocks.pop(request_id)

    def usage(self) -> KVUsage:
        """Return the numbers of free and owned tokens."""
        owned = sum(self._blocks.values())
        size = self._block_size
        return KVUsage(
            free=self._free_blocks * size, owned=owned * size, total=self._num_blocks * size
        )

    def attention(self, batch: FlatBatch) -> Attention:
        """Return attention that stores each token, which then sees its request so far.

        Decoded tokens, drafts and prompts take one kernel call. The native kernel sums in the order
        of the positions, so a token's bits depend neither on its neighbours nor on the chunks of
        its prompt (law 4).

            flat tokens   [ a | b | c n n | d d d d d d d ]   a, b decode, c verifies, d prefills
        """
        rows = [self._rows[each.active.request_id] for each in batch.scheduled]
        places = token_places(batch.scheduled, rows)
        return CachedAttention(self._storage, self._kernels, places)


def make_kv(model: Transformer, limits: EngineLimits) -> KVCache:
    """Make the cache of an engine: as large as its requests can need at most."""
    longest = _rounded(limits.max_len)
    return KVCache(
        model.config,
        num_tokens=_rounded(limits.kv_tokens or longest * limits.max_running),
        max_rows=2 * limits.max_running,  # with ended requests that may go on
        max_len=_rounded(limits.max_len + MAX_NODES),
        dtype=model.dtype,
    )


def _rounded(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE) * _BLOCK_SIZE
