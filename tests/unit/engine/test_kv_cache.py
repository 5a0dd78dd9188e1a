"""Contents of the contiguous cache that nobody owns; law 5 has every sequence of operations."""

import torch

from longtail.engine.batch import FlatBatch, Segment
from longtail.engine.kv.cache import ContiguousKVCache
from support.tiny_models import tiny_config

CONFIG = tiny_config("llama")


def test_earlier_contents_of_a_row_are_not_visible():
    kv = ContiguousKVCache(
        CONFIG,
        num_tokens=16,
        max_rows=1,
        max_len=16,
        dtype=torch.float64,
        device=torch.device("cpu"),
        block_size=4,
    )

    def seen(name: str, num_context: int, values: torch.Tensor) -> torch.Tensor:
        """Store one value a token; return the mean that each token sees (queries are 0)."""
        count = len(values)
        batch = FlatBatch(
            tokens=torch.zeros(count, dtype=torch.int64),
            positions=torch.zeros(count, dtype=torch.int64),  # nothing is rotated here
            segments=(Segment(request_id=name, num_context=num_context, num_tokens=count),),
            drawing=None,
        )
        queries = torch.zeros(count, CONFIG.num_heads, CONFIG.head_dim, dtype=torch.float64)
        stored = values[:, None, None].expand(-1, CONFIG.num_kv_heads, CONFIG.head_dim)
        stored = stored.contiguous()
        return kv.attention(batch).attend(0, queries, stored, stored, 0)[:, 0, 0]

    assert kv.try_grow("a", 12)
    seen("a", 0, torch.full((12,), torch.nan, dtype=torch.float64))
    kv.release("a")
    assert kv.try_grow("b", 12)
    values = torch.arange(12, dtype=torch.float64)
    means = values.cumsum(0) / torch.arange(1, 13)
    torch.testing.assert_close(seen("b", 0, values[:10]), means[:10])
    torch.testing.assert_close(seen("b", 10, values[10:]), means[10:])
