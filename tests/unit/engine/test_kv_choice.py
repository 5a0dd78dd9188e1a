"""The KV cache's size on a GPU, its refusals and choice; law 5 has every sequence of operations."""

import pytest
import torch

from longtail.engine.batch import FlatBatch, Segment
from longtail.engine.kv.cache import ContiguousKVCache
from longtail.engine.kv.choice import kv_bytes, make_kv, paged_tokens
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.engine.request import EngineLimits
from longtail.errors import RequestError
from longtail.model.kernels.pages import TorchPageKernels
from support.tiny_models import tiny_config, tiny_model

A_TOKEN = 1000
"""Bytes of keys and values."""


def limits(kv_tokens: int = 0) -> EngineLimits:
    return EngineLimits(max_running=4, max_step_tokens=16, max_len=100, kv_tokens=kv_tokens)


def test_a_token_takes_keys_and_values_of_every_layer():
    config = tiny_config("qwen3")  # two layers, two key heads of 16
    assert kv_bytes(config, torch.bfloat16) == 2 * 2 * 2 * 16 * 2
    assert kv_bytes(config, torch.float32) == 2 * kv_bytes(config, torch.bfloat16)


def test_all_requests_at_their_longest_where_memory_is_plenty():
    assert paged_tokens(limits(), A_TOKEN, 10**9) == 4 * 128, "100 tokens are two blocks of 64"


def test_the_cache_takes_what_fits_if_memory_is_short():
    # nine tenths of 300 000 bytes are 270 tokens, four whole blocks
    assert paged_tokens(limits(), A_TOKEN, 300_000) == 256


def test_a_given_size_is_allocated_in_full_or_refused():
    assert paged_tokens(limits(200), A_TOKEN, 10**9) == 256
    with pytest.raises(RequestError, match=r"rollout.kv_tokens = 300 .* enough for 256; lower it"):
        paged_tokens(limits(300), A_TOKEN, 300_000)


@pytest.mark.parametrize("free", [100_000, 0, -5])
def test_a_gpu_without_room_for_one_request_is_refused_with_the_remedy(free):
    with pytest.raises(RequestError, match=r"100 tokens .* lower rollout.max_tokens"):
        paged_tokens(limits(), A_TOKEN, free)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_batch_invariant_cache_has_no_tiles_that_sum_in_another_order(monkeypatch, invariant):
    kernels, asked = TorchPageKernels(), []
    attend = kernels.attend

    def recorded(*args: object, long: bool) -> torch.Tensor:
        asked.append(long)
        return attend(*args, long=long)

    monkeypatch.setattr(kernels, "attend", recorded)
    config = tiny_config("qwen3")
    kv = PagedKVCache(
        config,
        num_tokens=64,
        max_rows=2,
        max_len=64,
        dtype=torch.float64,
        device=torch.device("cpu"),
        kernels=kernels,
        batch_invariant=invariant,
    )
    assert kv.try_grow("prompt", 20)
    batch = FlatBatch(
        tokens=torch.zeros(20, dtype=torch.int64),
        positions=torch.arange(20),
        segments=(Segment(request_id="prompt", num_context=0, num_tokens=20),),
        drawing=None,
    )
    qkv = torch.randn(20, 8, 16, dtype=torch.float64)
    kv.attention(batch).attend(0, *qkv.split([4, 2, 2], 1), 0)
    assert asked == [not invariant]


def test_a_cpu_has_rows():
    assert isinstance(make_kv(tiny_model(), limits()), ContiguousKVCache)


def test_earlier_contents_of_a_row_are_not_visible():
    config = tiny_config("llama")
    kv = ContiguousKVCache(
        config,
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
        queries = torch.zeros(count, config.num_heads, config.head_dim, dtype=torch.float64)
        stored = values[:, None, None].expand(-1, config.num_kv_heads, config.head_dim)
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
