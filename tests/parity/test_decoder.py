"""decoder.c, all layers in one call, gives the bits of the layers called one by one."""

import pytest
import torch

from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import NO_TAPS, Taps
from longtail.speculation.tree import EMPTY, DraftTree
from longtail.types import Request
from support.tiny_models import NATIVE_DTYPES, tiny_model

TREE = DraftTree(tokens=(4, 6, 8), parents=(0, 0, 1), margins=(0.0, 0.0, 0.0))


def steps() -> list[list[Scheduled]]:
    """Two prompts in two steps, then one of them decodes and the other verifies a tree."""
    first, second = (
        ActiveRequest(
            request=Request(request_id=name, prompt_tokens=(1,), noise_key=0),
            tokens=[(7 * i + length) % 100 for i in range(length)],
            policy_version=0,
        )
        for name, length in (("a", 21), ("b", 40))
    )
    made = (((20, EMPTY), (15, EMPTY)), ((1, EMPTY), (24, EMPTY)), ((1, EMPTY), (1, TREE)))
    return [
        [
            Scheduled(active=active, num_tokens=count, draft=draft)
            for active, (count, draft) in zip((first, second), step, strict=True)
        ]
        for step in made
    ]


@torch.inference_mode()
def outputs(model: Transformer, taps: Taps) -> list[torch.Tensor]:
    """Hidden states and features of all steps, and the cache."""
    kv = KVCache(model.config, num_tokens=512, max_rows=3, max_len=128, dtype=model.dtype)
    found = []
    for number, scheduled in enumerate(steps()):
        for each in scheduled:
            assert kv.try_grow(each.active.request_id, 64)
            if number == 2:
                each.active.tokens.append(9)
                each.active.num_computed = len(each.active.tokens) - 1
        batch = flatten(scheduled)
        attention = kv.attention(batch)
        out = model.forward_with_features(batch.tokens, batch.positions, attention, taps)
        found += [each for each in out if each is not None]
        for each in scheduled:
            each.active.num_computed += each.num_tokens
    return found


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize(
    ("family", "sizes", "taps"),
    [
        ("llama", (32, 64), NO_TAPS),
        ("llama", (44, 70), NO_TAPS),  # no multiples of 32 once fell out of it, silently, on AMX
        ("mistral", (32, 64), Taps(layers=(0, 1))),
        ("qwen2", (32, 64), Taps(layers=(1,), final=True)),
        ("qwen3", (32, 64), Taps(layers=(0, 1), final=True)),
    ],
    ids=str,
)
def test_one_call_gives_the_bits_of_all_layers_one_by_one(family, dtype, sizes, taps):
    hidden, inner = sizes
    model = tiny_model(
        family, dtype=dtype, head_dim=16, hidden_size=hidden, intermediate_size=inner
    )
    model.pack()
    assert model._decoder is not None, "a native head size, and native products"
    together = outputs(model, taps)
    model._decoder = None
    apart = outputs(model, taps)
    assert len(together) == len(apart) == 3 * (1 + taps.any)
    for one, other in zip(together, apart, strict=True):
        assert one.equal(other)
        assert bool(one.isfinite().all())
