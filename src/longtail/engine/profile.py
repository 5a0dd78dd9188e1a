"""Measurement of the costs of engine steps and drafts, before the first request.

It runs the engine's own step on synthetic requests with a separate KV cache. The fastest of
repeated measurements counts, since other load only slows them. A second is enough, or two turns of
the sizes that decide whether drafting pays: the first steps correct errors, and sizes that would
take too long are interpolated or extrapolated.
"""

import time
from collections.abc import Sequence
from typing import final

import torch

from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv_cache import make_kv
from longtail.engine.request import ActiveRequest, EngineLimits
from longtail.engine.runner import ModelRunner, Sampler
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import NO_TAPS, Drafter, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import MAX_NODES, DraftTree
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve, fit_draft_cost
from longtail.types import Request, SamplingParams

_SECONDS = 1.0
_DRAFT_SECONDS = 0.3
_COUNTS = (1, 64, 8, 16, 17, 9, 4, 32, 12, 13, 33, 24, 2, 6, 48, 3, 128, 256, 512)
"""Flat tokens of the measured steps, the most informative first: few tokens decide whether drafting
pays, and larger steps continue the line of the last two. Rows are computed in tiles of at most 12,
of 6 without AVX-512 or of 16 with AMX, so that costs rise in steps."""
_NEEDED = 12
"""Number of these sizes that are measured, however long a step takes."""
_REPEATS = 3
_NEEDED_REPEATS = 2
_SHORT, _LONG, _A_STEP = 32, 512, 4
"""Tokens of context, and tokens per step of a drafted request."""
_LONG_REQUESTS = 8
"""Most requests of a step that measures the cost of context."""
_SHAPES = (Strategy(depth=1), Strategy(depth=6, width=2, size=12, beam=1))


@torch.inference_mode()
def measure_steps(model: Transformer, limits: EngineLimits) -> CostModel:
    """Time steps of several sizes with short contexts, and some with long ones."""
    steps = SyntheticSteps(model, min(limits.max_running, 32), limits.max_step_tokens)
    started = time.perf_counter()
    largest = min(limits.max_step_tokens, limits.max_running * (1 + MAX_NODES))
    counts = [min(count, largest) for count in _COUNTS]
    steps.step(1, steps.short)  # warm-up
    seconds: dict[int, float] = {}
    for repeat in range(_REPEATS):  # repeats apart in time, so that a stall affects only one
        deadline = started + _SECONDS * (repeat + 1) / _REPEATS
        for place, count in enumerate(dict.fromkeys(counts)):
            is_needed = place < _NEEDED and repeat < _NEEDED_REPEATS
            if is_needed or time.perf_counter() < deadline:
                took = steps.step(count, steps.short)
                seconds[count] = min(took, seconds.get(count, took))
    knots = sorted(seconds)
    curve = TimeCurve(knots, [seconds[count] for count in knots])
    num = max(1, min(steps.num_requests, _LONG_REQUESTS, largest // 4))
    requests_s, drafts_s = steps.context_s(num), steps.context_s(4 * num)
    pairs = num * max(steps.long - steps.short, 1)
    return CostModel(
        curve,
        pair_s=max(requests_s, 0.0) / pairs,
        node_pair_s=min(max(drafts_s - requests_s, 0.0) / 3, max(requests_s, 0.0)) / pairs,
    )


@torch.inference_mode()
def measure_drafts(drafter: Drafter, model: Transformer, limits: EngineLimits) -> DraftCost:
    """Time proposals for few and many requests, with shallow and deep drafts."""
    deadline = time.perf_counter() + _DRAFT_SECONDS
    sampler = Sampler(model)
    rounds: list[tuple[int, int, int, float]] = []
    for num in dict.fromkeys((1, min(8, limits.max_running), min(32, limits.max_running))):
        actives = [synthetic_request(f"profile-{i}", 0) for i in range(num)]
        extend_requests(drafter, model, actives, _SHORT)
        draftable = [active.draftable(MAX_NODES) for active in actives]  # their tokens grow
        for turn in range(1 + _REPEATS):
            for shape in _SHAPES:
                extend_requests(drafter, model, actives, _A_STEP)
                started = time.perf_counter()
                trees = drafter.propose(draftable, shape, sampler.for_drafts(actives))
                took = time.perf_counter() - started
                deep = [tree.depth for tree in trees]
                if (turn and time.perf_counter() < deadline) or len(rounds) < len(_SHAPES):
                    rounds.append((num, max(deep), sum(deep), took))
        for active in actives:
            drafter.forget(active.request_id)
    return fit_draft_cost(rounds)


@final
class SyntheticSteps:
    """Runs steps of synthetic requests."""

    def __init__(self, model: Transformer, num_requests: int, max_step_tokens: int) -> None:
        positions = model.config.max_positions - MAX_NODES - 1
        self.short, self.long = min(_SHORT, positions), min(_LONG, positions)
        self.num_requests = num_requests
        own = EngineLimits(
            max_running=num_requests,
            max_step_tokens=max_step_tokens,
            max_len=self.long + MAX_NODES + 1,
        )
        self._kv = make_kv(model, own)
        self._model, self._runner = model, ModelRunner(model, self._kv)

    def context_s(self, num_tokens: int) -> float:
        """Return the additional seconds of a step of `num_tokens` with long contexts."""
        long_s, short_s = (
            min(self.step(num_tokens, context) for _ in range(1 + _REPEATS))
            for context in (self.long, self.short)
        )
        return long_s - short_s

    def step(self, num_tokens: int, context: int) -> float:
        """Return the seconds of a step of `num_tokens`; drafts fill it if requests are too few."""
        num = min(num_tokens, self.num_requests)
        sizes = [num_tokens // num - 1 + (i < num_tokens % num) for i in range(num)]
        scheduled = []
        for i, size in enumerate(sizes):
            active = synthetic_request(f"{i}", context)
            assert self._kv.try_grow(active.request_id, context + 1 + size), "the cache fits"
            scheduled.append(Scheduled(active=active, num_tokens=1, draft=_chain(size)))
        started = time.perf_counter()
        self._runner.run(flatten(scheduled), scheduled, NO_TAPS)
        return time.perf_counter() - started


def _chain(size: int) -> DraftTree:
    return DraftTree(tokens=(0,) * size, parents=tuple(range(size)), margins=(0.0,) * size)


def synthetic_request(name: str, context: int) -> ActiveRequest:
    """Return a request with one pending token after `context` computed ones."""
    sampling = SamplingParams(max_tokens=4 * MAX_NODES)
    tokens = [0] * (context + 1)
    request = Request(request_id=name, prompt_tokens=(0,), noise_key=len(name), sampling=sampling)
    return ActiveRequest(request=request, tokens=tokens, policy_version=0, num_computed=context)


def extend_requests(
    drafter: Drafter, model: Transformer, actives: Sequence[ActiveRequest], count: int
) -> None:
    """Append `count` tokens to each request; the drafter observes all but the last."""
    taps = drafter.taps
    size = (len(taps.layers) + taps.final) * model.config.hidden_size
    features = torch.zeros(len(actives) * count, size, dtype=model.dtype)
    seen = [
        Observed(
            request_id=active.request_id,
            tokens=active.tokens,
            start=active.num_computed,
            num_tokens=count,
            prompt_len=active.prompt_len,
        )
        for active in actives
    ]
    for active in actives:
        active.tokens += [0] * count
    drafter.observe(seen, features if taps.any else None)
    for active in actives:
        active.num_computed += count
