"""Blocks of a paged cache, by hand; any sequence of operations is law 5's business."""

import pytest

from longtail.engine.kv.blocks import BlockPool
from longtail.engine.kv.cache import KVUsage


def make_pool(num_blocks: int = 8) -> tuple[BlockPool, list[tuple[int, int]]]:
    copies: list[tuple[int, int]] = []
    pool = BlockPool(
        num_blocks=num_blocks,
        block_size=4,
        max_owners=3,
        max_blocks=6,
        copy=lambda source, target: copies.append((source, target)),
    )
    return pool, copies


def test_a_prefix_is_shared_and_the_block_in_which_it_ends_is_copied():
    """The example of the module: b shares 6 tokens of a's 10."""
    pool, copies = make_pool()
    assert pool.try_grow("a", 10)
    assert pool.try_share("a", "b", num_shared=6, num_tokens=7)
    assert (pool.blocks("a"), pool.blocks("b")) == ((0, 1, 2), (0, 3))
    assert copies == [(1, 3)]
    assert pool.usage() == KVUsage(free=16, owned=16, total=32), "a shared block counts once"
    assert pool.table[pool.row("b"), :2].tolist() == [0, 3]
    pool.release("a")
    assert pool.usage().owned == 8, "what b shares stays"


def test_a_shared_block_is_copied_before_its_new_owner_writes():
    pool, copies = make_pool()
    assert pool.try_grow("a", 8)
    assert pool.try_share("a", "b", num_shared=8, num_tokens=9)
    pool.hand_over("a", "c", 7)
    assert copies == [], "nothing is written yet"
    assert pool.try_grow("c", 8)
    assert copies == [(1, 3)]
    assert (pool.blocks("b"), pool.blocks("c")) == ((0, 1, 2), (0, 3))
    assert pool.try_grow("c", 8), "once"
    assert len(copies) == 1


def test_an_unshared_block_is_written_without_a_copy():
    pool, copies = make_pool()
    assert pool.try_grow("a", 8)
    assert pool.try_share("a", "b", num_shared=8, num_tokens=8)
    pool.hand_over("a", "c", 7)
    pool.release("b")
    assert pool.try_grow("c", 8)
    assert copies == []


def test_a_copy_needs_a_free_block_and_a_refusal_changes_nothing():
    pool, copies = make_pool(num_blocks=2)
    assert pool.try_grow("a", 8)
    assert pool.try_share("a", "b", num_shared=8, num_tokens=8)
    pool.hand_over("a", "c", 7)
    before = pool.usage(), pool.blocks("c")
    assert not pool.try_grow("c", 8)
    assert not pool.try_share("b", "d", num_shared=3, num_tokens=4)
    assert (pool.usage(), pool.blocks("c"), copies) == (*before, [])


def test_wrong_owners_of_blocks_are_refused():
    pool, _ = make_pool()
    assert pool.try_grow("a", 4)
    with pytest.raises(AssertionError, match="already owns"):
        pool.try_share("a", "a", num_shared=1, num_tokens=2)
    with pytest.raises(AssertionError, match="than reserved"):
        pool.try_share("a", "b", num_shared=4, num_tokens=3)
    with pytest.raises(AssertionError, match="handed over than owned"):
        pool.hand_over("a", "b", 5)
