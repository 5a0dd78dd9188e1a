"""The contiguous cache: accounting by hand, contents through widening, sharing, handing over."""

import pytest
import torch
from torch import Tensor

from longtail.engine.batch import FlatBatch, Segment
from longtail.engine.kv.cache import ContiguousKVCache, KeptPath, KVUsage
from longtail.speculation.tree import EMPTY, DraftTree
from support.tiny_models import tiny_config

CPU = torch.device("cpu")
CONFIG = tiny_config("llama")


def make_cache(**changes: object) -> ContiguousKVCache:
    sizes = {"num_tokens": 160, "max_rows": 3, "max_len": 80, "dtype": torch.float64}
    return ContiguousKVCache(CONFIG, device=CPU, block_size=4, **{**sizes, **changes})


def put(
    kv: ContiguousKVCache, name: str, num_context: int, values: Tensor, draft: DraftTree = EMPTY
) -> Tensor:
    """Store one value a token in every layer; return the mean each token sees (queries are 0).

    The last values are those of the draft's nodes.
    """
    num_tokens = len(values) - draft.size
    segment = Segment(request_id=name, num_context=num_context, num_tokens=num_tokens, draft=draft)
    batch = FlatBatch(
        tokens=torch.zeros(len(values), dtype=torch.int64),
        positions=torch.zeros(len(values), dtype=torch.int64),  # nothing is rotated here
        segments=(segment,),
        drawing=None,
    )
    attention = kv.attention(batch)
    queries = torch.zeros(len(values), CONFIG.num_heads, CONFIG.head_dim, dtype=torch.float64)
    stored = values[:, None, None].expand(-1, CONFIG.num_kv_heads, CONFIG.head_dim).contiguous()
    seen = [attention.attend(layer, queries, stored, stored, 0) for layer in range(2)]
    torch.testing.assert_close(seen[0], seen[1], equal_nan=True)
    return seen[0][:, 0, 0]


def means(values: Tensor) -> Tensor:
    return values.cumsum(0) / torch.arange(1, len(values) + 1)


def test_capacity_is_counted_in_whole_blocks():
    kv = make_cache(num_tokens=20)
    assert kv.usage() == KVUsage(free=20, owned=0, total=20)
    assert kv.try_grow("a", 5)
    assert kv.usage() == KVUsage(free=12, owned=8, total=20)
    assert kv.try_grow("a", 8), "the second block was his already"
    assert kv.try_grow("a", 3), "asking for less gives nothing back"
    assert kv.usage() == KVUsage(free=12, owned=8, total=20)
    assert not kv.try_grow("b", 13)
    assert kv.usage() == KVUsage(free=12, owned=8, total=20)
    assert kv.try_grow("b", 12)
    assert not kv.try_grow("a", 9)
    kv.release("b")
    assert kv.usage() == KVUsage(free=12, owned=8, total=20)


def test_there_are_no_more_owners_than_rows():
    kv = make_cache(max_rows=2)
    assert kv.try_grow("a", 1)
    assert kv.try_grow("b", 1)
    assert not kv.try_grow("c", 1)
    kv.release("a")
    assert kv.try_grow("c", 1)


def test_growing_past_the_rectangle_keeps_every_token():
    """Eight blocks are allocated at first; longer rows replace the rectangle."""
    kv = make_cache()
    values = torch.randn(80, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert kv.try_grow("short", 10)
    put(kv, "short", 0, -values[:10])
    for start, end in ((0, 30), (30, 33), (33, 34), (34, 50), (50, 80)):
        assert kv.try_grow("long", end)
        seen = put(kv, "long", start, values[start:end])
        torch.testing.assert_close(seen, means(values)[start:end])
    torch.testing.assert_close(put(kv, "short", 9, -values[9:10])[0], means(-values)[9])


def test_a_prefix_is_shared_by_copy():
    kv = make_cache()
    values = torch.arange(1.0, 11.0, dtype=torch.float64)
    assert kv.try_grow("a", 10)
    put(kv, "a", 0, values)
    assert kv.try_share("a", "b", num_shared=6, num_tokens=7)
    assert put(kv, "b", 6, torch.tensor([100.0]).double()).item() == pytest.approx((21 + 100) / 7)
    kv.release("a")
    assert put(kv, "b", 6, torch.tensor([7.0]).double()).item() == pytest.approx(4.0)


def test_handing_over_keeps_the_prefix_and_frees_the_rest():
    kv = make_cache()
    assert kv.try_grow("a", 20)
    put(kv, "a", 0, torch.arange(1.0, 21.0, dtype=torch.float64))
    kv.hand_over("a", "b", 6)
    assert kv.usage().owned == 8
    assert put(kv, "b", 6, torch.tensor([7.0]).double()).item() == pytest.approx(4.0)
    assert kv.try_grow("a", 4), "the old owner is a stranger now"


TREE = DraftTree(tokens=(0,) * 4, parents=(0, 0, 1, 3), margins=(0.0,) * 4)
"""tree.py's running example: 1a and 2b below the root, 3c below 1a, 4d below 3c."""


def test_a_node_sees_its_text_and_its_ancestors_and_only_accepted_ones_stay():
    kv = make_cache()
    text = torch.arange(1.0, 10.0, dtype=torch.float64)  # nine tokens, 45 in all
    assert kv.try_grow("a", 13)
    put(kv, "a", 0, text[:8])
    nodes = torch.tensor([100.0, 200.0, 300.0, 400.0], dtype=torch.float64)
    seen = put(kv, "a", 8, torch.cat((text[8:], nodes)), TREE)
    assert seen.tolist() == pytest.approx([45 / 9, 145 / 10, 245 / 10, 445 / 11, 845 / 12])

    kv.keep([KeptPath(request_id="a", num_tokens=9, path=(1, 3))])
    assert kv.usage() == KVUsage(free=148, owned=12, total=160), "11 tokens stay, in 3 blocks of 4"
    assert kv.try_grow("a", 12)
    last = put(kv, "a", 11, torch.tensor([1000.0]).double())
    assert last.item() == pytest.approx((45 + 100 + 300 + 1000) / 12)


def test_drafts_of_several_requests_are_kept_at_once_each_its_own_path():
    kv = make_cache()
    nodes = torch.tensor([100.0, 200.0, 300.0, 400.0], dtype=torch.float64)
    paths = {"chain": (1, 3, 4), "second": (2,), "none": ()}
    for number, name in enumerate(paths, start=1):
        assert kv.try_grow(name, 5)
        put(kv, name, 0, torch.cat((torch.tensor([float(number)]).double(), nodes)), TREE)
    kv.keep([KeptPath(request_id=n, num_tokens=1, path=path) for n, path in paths.items()])
    assert kv.usage().owned == 4 + 4 + 4, "what is behind the accepted nodes is free again"
    kept = {"chain": [1.0, 100.0, 300.0, 400.0], "second": [2.0, 200.0], "none": [3.0]}
    for name, held in kept.items():
        assert kv.try_grow(name, len(held) + 1)
        seen = put(kv, name, len(held), torch.tensor([7.0]).double())
        assert seen.item() == pytest.approx((sum(held) + 7) / (len(held) + 1))


def test_a_draft_may_outgrow_the_rectangle():
    """Eight blocks of four are there at first; nodes lie behind the text wherever it ends."""
    kv = make_cache()
    values = torch.randn(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert kv.try_grow("a", 31)
    put(kv, "a", 0, values[:31])
    assert kv.try_grow("a", 36)
    put(kv, "a", 31, values[31:36], TREE)
    kv.keep([KeptPath(request_id="a", num_tokens=32, path=(2,))])
    assert kv.usage().owned == 36
    kept = torch.cat((values[:32], values[33:34]))
    assert kv.try_grow("a", 34)
    seen = put(kv, "a", 33, values[39:])
    torch.testing.assert_close(seen[0], torch.cat((kept, values[39:])).mean())


def test_earlier_contents_of_a_row_are_not_visible():
    kv = make_cache(max_rows=1)
    assert kv.try_grow("a", 12)
    put(kv, "a", 0, torch.full((12,), torch.nan, dtype=torch.float64))
    kv.release("a")
    assert kv.try_grow("b", 12)
    values = torch.arange(12, dtype=torch.float64)
    torch.testing.assert_close(put(kv, "b", 0, values[:10]), means(values)[:10])
    torch.testing.assert_close(put(kv, "b", 10, values[10:]), means(values)[10:])


def test_wrong_owners_are_refused():
    kv = make_cache()
    assert kv.try_grow("a", 8)
    assert kv.try_grow("b", 4)
    with pytest.raises(AssertionError, match="than reserved"):
        kv.try_share("a", "c", num_shared=5, num_tokens=4)
    with pytest.raises(AssertionError, match="already owns"):
        kv.try_share("a", "b", num_shared=4, num_tokens=4)
    with pytest.raises(AssertionError, match="already owns"):
        kv.hand_over("a", "b", 4)
    with pytest.raises(AssertionError, match="handed over than owned"):
        kv.hand_over("b", "c", 5)
