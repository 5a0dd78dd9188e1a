"""Ownership of the blocks of a paged KV cache, in integers.

A block holds `block_size` consecutive tokens. Requests with the same beginning share full blocks by
reference; a partly filled block is copied for the new request. So a request that writes into a
block owns it alone.

    block_size 4, b shares 6 tokens of a's 10

    a   [0 1 2 3] [4 5 6 7] [8 9 . .]        blocks 0 1 2
    b   [0 1 2 3] [4 5 . .]                  blocks 0 3, block 3 a copy of block 1
    users of the blocks 0 1 2 3: 2 1 1 1
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from longtail.engine.kv.cache import KVUsage


@dataclass(slots=True)
class _Owner:
    """A request's row of the table, and its blocks in the order of its tokens."""

    row: int
    blocks: list[int]
    borrowed: int | None = None
    """Index of a partly filled block taken from another request: copied before it is written, if
    it is still shared then."""


@final
class BlockPool:
    """Blocks with reference counts, and the block table of attention.

    Free + owned = total at any time. `copy(source, target)` is called for each copied block.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_owners: int,
        max_blocks: int,
        copy: Callable[[int, int], None],
    ) -> None:
        self._block_size, self._num_blocks, self._copy = block_size, num_blocks, copy
        self._users = [0] * num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._free_rows = list(range(max_owners))[::-1]
        self._owners: dict[str, _Owner] = {}
        self.table = np.zeros((max_owners, max_blocks), dtype=np.int32)
        """Blocks of each row in order; entries after a request's last block are undefined."""
        self.changes = 0
        """Number of changes of the table."""

    def row(self, request_id: str) -> int:
        """Return the request's row of the table."""
        return self._owners[request_id].row

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """Return the request's blocks in the order of its tokens."""
        return tuple(self._owners[request_id].blocks)

    def usage(self) -> KVUsage:
        """Return the numbers of tokens; a shared block counts once."""
        owned = len({block for owner in self._owners.values() for block in owner.blocks})
        size = self._block_size
        return KVUsage(
            free=len(self._free) * size, owned=owned * size, total=self._num_blocks * size
        )

    def try_grow(self, request_id: str, num_tokens: int) -> bool:
        """Reserve `num_tokens`; copy a shared block in which the request writes next."""
        owner = self._owners.get(request_id)
        held = 0 if owner is None else len(owner.blocks)
        copied = owner is not None and self._is_shared(owner)
        missing = max(0, self._count(num_tokens) - held)
        if missing + copied > len(self._free) or (owner is None and not self._free_rows):
            return False
        if owner is None:
            owner = self._owners[request_id] = _Owner(row=self._free_rows.pop(), blocks=[])
        if copied:
            assert owner.borrowed is not None
            shared = owner.blocks[owner.borrowed]
            owner.blocks[owner.borrowed] = own = self._take()
            self._copy(shared, own)
            self._drop([shared])
        owner.borrowed = None
        if missing or copied:
            owner.blocks += [self._take() for _ in range(missing)]
            self._write(owner)
        return True

    def try_share(
        self, source_id: str, target_id: str, *, num_shared: int, num_tokens: int
    ) -> bool:
        """Reserve `num_tokens` for a new owner, the first ones shared with the source."""
        assert target_id not in self._owners, f"{target_id} already owns blocks"
        assert num_shared <= num_tokens, "more tokens shared than reserved"
        source = self._owners[source_id]
        assert self._count(num_shared) <= len(source.blocks), "more tokens shared than owned"
        num_full = num_shared // self._block_size
        missing = self._count(num_tokens) - num_full
        if missing > len(self._free) or not self._free_rows:
            return False
        own = [self._take() for _ in range(missing)]
        if num_shared % self._block_size:
            self._copy(source.blocks[num_full], own[0])
        for block in source.blocks[:num_full]:
            self._users[block] += 1
        target = _Owner(row=self._free_rows.pop(), blocks=source.blocks[:num_full] + own)
        self._owners[target_id] = target
        self._write(target)
        return True

    def hand_over(self, source_id: str, target_id: str, num_tokens: int) -> None:
        """Give the source's blocks of its first `num_tokens` tokens to a new owner."""
        assert target_id not in self._owners, f"{target_id} already owns blocks"
        owner = self._owners[source_id]
        assert self._count(num_tokens) <= len(owner.blocks), "more tokens handed over than owned"
        del self._owners[source_id]
        self._owners[target_id] = owner
        self.cut(target_id, num_tokens)
        place, inside = divmod(num_tokens, self._block_size)
        owner.borrowed = place if inside else None

    def cut(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` tokens."""
        blocks, kept = self._owners[request_id].blocks, self._count(num_tokens)
        self._drop(blocks[kept:])
        del blocks[kept:]

    def release(self, request_id: str) -> None:
        """Free the row, and the blocks that no other request owns."""
        owner = self._owners.pop(request_id)
        self._drop(owner.blocks)
        self._free_rows.append(owner.row)

    def _count(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _is_shared(self, owner: _Owner) -> bool:
        """Return whether the block in which the owner writes next has other users."""
        place = owner.borrowed
        return place is not None and self._users[owner.blocks[place]] > 1

    def _take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _write(self, owner: _Owner) -> None:
        self.table[owner.row, : len(owner.blocks)] = owner.blocks
        self.changes += 1
