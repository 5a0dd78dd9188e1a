"""The runner: noise made ahead is the keyed noise; one token for each drawing request."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes import markov_model
from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv_cache import ContiguousKVCache
from longtail.engine.request import ActiveRequest
from longtail.engine.runner import ModelRunner, NoiseAhead
from longtail.sampling import gumbel_noise
from longtail.types import Request, SamplingParams

CPU = torch.device("cpu")


def active(request_id: str, num_tokens: int, key: int, **sampling: object) -> ActiveRequest:
    request = Request(
        request_id=request_id,
        prompt_tokens=(1,) * num_tokens,
        noise_key=key,
        sampling=SamplingParams(**sampling),
    )
    return ActiveRequest(request=request, tokens=[1] * num_tokens, policy_version=0)


def expected(drawing: list[ActiveRequest], vocab_size: int) -> torch.Tensor:
    keys = torch.tensor([each.request.noise_key for each in drawing])
    return gumbel_noise(keys, torch.tensor([len(each.tokens) for each in drawing]), vocab_size)


@given(
    steps=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=60),
    max_entries=st.sampled_from([1, 40, 200, 2**18]),
)
def test_noise_ahead_is_the_keyed_noise_whoever_draws(steps, max_entries):
    """Requests come and go, pause and return, and the table is refilled at any time."""
    ahead = NoiseAhead(13, CPU, max_entries=max_entries)
    requests = [active(str(i), 2 + 5 * i, 100 - i) for i in range(5)]
    for members in steps:
        drawing = [requests[i] for i in sorted(members)]
        assert ahead.rows(drawing).equal(expected(drawing, 13))
        for each in drawing:
            each.tokens.append(0)


def test_a_later_request_of_the_same_name_gets_its_own_noise():
    """Names return every epoch with other keys; the table once kept the rows of the old key."""
    ahead = NoiseAhead(13, CPU)
    ahead.rows([active("train/17#3", 4, key=1)])
    again = [active("train/17#3", 4, key=2)]
    assert ahead.rows(again).equal(expected(again, 13))


def test_only_requests_whose_last_token_is_computed_draw():
    scores = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double()
    model = markov_model(scores)
    kv = ContiguousKVCache(
        model.config, num_tokens=128, max_rows=3, max_len=64, dtype=model.dtype, device=CPU
    )
    runner = ModelRunner(model, kv)
    decoding, prefilling = active("a", 1, 7, top_k=4), active("b", 6, 8)
    for each in (decoding, prefilling):
        assert kv.try_grow(each.request_id, 16)
    scheduled = [
        Scheduled(active=decoding, num_tokens=1),
        Scheduled(active=prefilling, num_tokens=5),
    ]
    out = runner.run(flatten(scheduled, CPU), [decoding])
    kept = scores[1].argsort(descending=True)[:4]
    noisy = scores[1, kept] + expected([decoding], 9)[0, kept]
    assert out.tokens == [int(kept[noisy.argmax()])]
    logp = scores[1, kept].log_softmax(-1)[noisy.argmax()]
    assert out.logprobs == pytest.approx([float(logp)], abs=1e-12)

    prefilling.num_computed = 0
    silent = runner.run(flatten([Scheduled(active=prefilling, num_tokens=5)], CPU), [])
    assert (silent.tokens, silent.logprobs, silent.sample_s) == ([], [], 0.0)
    assert min(out.forward_s, out.sample_s, silent.forward_s) > 0
