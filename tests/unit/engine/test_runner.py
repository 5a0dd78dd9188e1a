"""The runner: noise made ahead is the keyed noise; a draw for each drawing request and node."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv.cache import ContiguousKVCache
from longtail.engine.request import ActiveRequest
from longtail.engine.step.runner import ModelRunner, RunnerOutput
from longtail.engine.step.sampler import NoiseTable
from longtail.model.transformer import Transformer
from longtail.sampling import gumbel_noise
from longtail.speculation.drafter import NO_TAPS, Taps
from longtail.speculation.tree import DraftTree
from longtail.types import Request, SamplingParams
from support.fakes import markov_model

CPU = torch.device("cpu")


def active(request_id: str, num_tokens: int, key: int, **sampling: object) -> ActiveRequest:
    request = Request(
        request_id=request_id,
        prompt_tokens=(1,) * num_tokens,
        noise_key=key,
        sampling=SamplingParams(**sampling),
    )
    return ActiveRequest(request=request, tokens=[1] * num_tokens, policy_version=0)


def expected(
    drawing: list[ActiveRequest], vocab_size: int, aheads: list[list[int]] | None = None
) -> torch.Tensor:
    """Noise of each request's next place, or of the given ones counted from it."""
    places = [
        (each.request.noise_key, len(each.tokens) + ahead)
        for each, listed in zip(drawing, aheads or [[0]] * len(drawing), strict=True)
        for ahead in listed
    ]
    return gumbel_noise(*torch.tensor(places).T.contiguous(), vocab_size)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    drawn=st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=15),
    depth=st.integers(1, 9),
    max_entries=st.sampled_from([1, 200, 2**18]),
)
def test_drafts_use_the_noise_of_the_positions_of_their_nodes(drawn, depth, max_entries):
    """A node of depth 1 takes the next place; what was handed out outlives a refill."""
    noise = NoiseTable(13, CPU, max_entries=max_entries)
    requests = [active(str(i), 2 + 5 * i, 100 - i) for i in range(5)]
    for members in drawn:
        drawing = [requests[i] for i in sorted(members)]
        given_out = noise.for_drafts(drawing, depth)
        stranger = active("stranger", 3, 7)
        noise.rows([stranger], [[40]])
        for d in range(1, depth + 1):
            assert given_out.at_depth(d).equal(expected(drawing, 13, [[d - 1]] * len(drawing)))
        for i, each in enumerate(drawing):
            each.tokens += [0] * (1 + i)


def make_runner(model: Transformer, *requests: ActiveRequest) -> ModelRunner:
    kv = ContiguousKVCache(
        model.config, num_tokens=128, max_rows=3, max_len=64, dtype=model.dtype, device=CPU
    )
    for each in requests:
        assert kv.try_grow(each.request_id, 16)
    return ModelRunner(model, kv)


def run(runner: ModelRunner, *scheduled: Scheduled, taps: Taps = NO_TAPS) -> RunnerOutput:
    drawing = [each for each in scheduled if each.draws]
    return runner.launch(flatten(scheduled, CPU), drawing, taps).wait()


SCORES = torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double()


def test_only_requests_whose_last_token_is_computed_draw():
    decoding, prefilling = active("a", 1, 7, top_k=4), active("b", 6, 8)
    runner = make_runner(markov_model(SCORES), decoding, prefilling)
    out = run(
        runner,
        Scheduled(active=decoding, num_tokens=1),
        Scheduled(active=prefilling, num_tokens=5),
    )
    kept = SCORES[1].argsort(descending=True)[:4]
    noisy = SCORES[1, kept] + expected([decoding], 9)[0, kept]
    assert out.tokens == [int(kept[noisy.argmax()])]
    logp = SCORES[1, kept].log_softmax(-1)[noisy.argmax()]
    assert out.logprobs == pytest.approx([float(logp)], abs=1e-12)
    assert out.features is None

    prefilling.num_computed = 0
    silent = run(runner, Scheduled(active=prefilling, num_tokens=5))
    assert (silent.tokens, silent.logprobs, silent.sample_s) == ([], [], 0.0)
    assert min(out.forward_s, out.sample_s, silent.forward_s) > 0


def test_every_node_draws_from_its_own_token_with_the_noise_of_its_depth():
    """Node i of the tree 0 -> {1, 2}, 1 -> {3} holds a token whose row of SCORES it draws from."""
    plain, drafted = active("a", 1, 7), active("b", 1, 8, temperature=0.5)
    tree = DraftTree(tokens=(4, 6, 8), parents=(0, 0, 1), margins=(0.0, 0.0, 0.0))
    runner = make_runner(markov_model(SCORES), plain, drafted)
    out = run(
        runner,
        Scheduled(active=plain, num_tokens=1),
        Scheduled(active=drafted, num_tokens=1, draft=tree),
        taps=Taps(final=True),
    )
    noise = expected([plain, drafted], 9, [[0], [0, 1, 1, 2]])
    logp = torch.cat((SCORES[1:2], SCORES[[1, 4, 6, 8]] / 0.5)).log_softmax(-1)
    assert out.tokens == (logp + noise).argmax(-1).tolist()
    assert out.logprobs == pytest.approx(
        [float(row[token]) for row, token in zip(logp, out.tokens, strict=True)], abs=1e-12
    )
    assert out.features is not None
    assert out.features.shape == (5, 9), "a feature for each flat token, nodes included"
