"""Measures what engine steps and drafts cost on this machine, before the first request.

Of repeated measurements the quickest counts: whatever else the machine did only made it slower.
It runs the very step that the engine runs, on made-up requests with a KV cache of their own, so
nothing of the engine's is touched. A second is enough: what it gets wrong is corrected by the first
steps, and what it could not measure in time lies between what it could.
"""

import time
from collections.abc import Sequence
from typing import final

import torch

from longtail.engine.batch import Scheduled, flatten
from longtail.engine.kv.choice import make_kv
from longtail.engine.limits import EngineLimits
from longtail.engine.request import ActiveRequest
from longtail.engine.step.runner import ModelRunner
from longtail.engine.step.sampler import make_sampler
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Drafter, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import NO_TAPS
from longtail.speculation.tree import MAX_NODES, DraftTree
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve, fit_draft_cost
from longtail.types import Request, SamplingParams

_SECONDS = 1.0
_DRAFT_SECONDS = 0.3
_COUNTS = (1, 512, 8, 64, 2, 32, 4, 128, 16, 256, 48, 96, 24, 192, 12, 384)
"""Flat tokens, the most telling first."""
_REPEATS = 3
_SHORT, _LONG, _A_STEP = 32, 512, 4
"""Tokens of context, and of a step that verified a draft."""
_SHAPES = (Strategy(depth=1), Strategy(depth=6, width=2, size=12, beam=1))


def measure_costs(
    model: Transformer,
    limits: EngineLimits,
    drafters: Sequence[Drafter],
    known: CostModel | None,
) -> CostModel:
    """Measure what is not known: steps at first, drafts of every set of drafters."""
    costs = _measure_steps(model, limits) if known is None else known
    costs.drafts = [_measure_drafts(drafter, model, limits) for drafter in drafters]
    return costs


@torch.inference_mode()
def _measure_steps(model: Transformer, limits: EngineLimits) -> CostModel:
    """Time steps of several sizes with short contexts, then some with long ones."""
    bench = SyntheticSteps(model, min(limits.max_running, 32), limits.max_step_tokens)
    deadline = time.perf_counter() + _SECONDS
    most = min(limits.max_step_tokens, limits.max_running * (1 + MAX_NODES))
    counts = [min(count, most) for count in _COUNTS]
    bench.step(1, bench.short)  # whatever happens on a first call
    seconds: dict[int, float] = {}
    for _ in range(_REPEATS):  # apart in time, so that a stall does not spoil all of one size
        for count in dict.fromkeys(counts):
            if len(seconds) < 2 or time.perf_counter() < deadline:
                took = bench.step(count, bench.short)
                seconds[count] = min(took, seconds.get(count, took))
    knots = sorted(seconds)
    curve = TimeCurve(knots, without_stalls(knots, [seconds[count] for count in knots]))
    num = max(1, min(bench.num_requests, most // 4))
    requests_s, drafts_s = bench.longer(num), bench.longer(4 * num)
    pairs = num * max(bench.long - bench.short, 1)
    return CostModel(
        curve,
        pair_s=max(requests_s, 0.0) / pairs,
        node_pair_s=min(max(drafts_s - requests_s, 0.0) / 3, max(requests_s, 0.0)) / pairs,
    )


def without_stalls(counts: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Lower what stands out above both neighbours: the machine was busy with something else.

    Example: counts (1, 2, 3), seconds (1.0, 9.0, 2.0): the second is at most a tenth over 1.5
    """
    kept = list(seconds)
    for _ in range(2):
        for i in range(1, len(kept) - 1):
            share = (counts[i] - counts[i - 1]) / (counts[i + 1] - counts[i - 1])
            between = kept[i - 1] + share * (kept[i + 1] - kept[i - 1])
            kept[i] = min(kept[i], 1.1 * max(between, kept[i - 1]))
    return kept


@torch.inference_mode()
def _measure_drafts(drafter: Drafter, model: Transformer, limits: EngineLimits) -> DraftCost:
    """Time proposals for few and many requests, shallow and deep."""
    deadline = time.perf_counter() + _DRAFT_SECONDS
    noise = make_sampler(model).noise
    rounds: list[tuple[int, int, int, float]] = []
    for num in dict.fromkeys((1, min(8, limits.max_running), min(32, limits.max_running))):
        actives = [synthetic_request(f"profile-{i}", 0) for i in range(num)]
        extend_texts(drafter, model, actives, _SHORT)
        asked = [active.draftable(MAX_NODES) for active in actives]  # their texts grow
        for turn in range(1 + _REPEATS):
            for shape in _SHAPES:
                extend_texts(drafter, model, actives, _A_STEP)
                started = time.perf_counter()
                trees = drafter.propose(asked, shape, noise.for_drafts(actives, shape.depth))
                took = time.perf_counter() - started
                deep = [tree.depth for tree in trees]
                if (turn and time.perf_counter() < deadline) or len(rounds) < len(_SHAPES):
                    rounds.append((num, max(deep), sum(deep), took))
        for active in actives:
            drafter.forget(active.request_id)
    return fit_draft_cost(rounds)


@final
class SyntheticSteps:
    """Steps of made-up requests."""

    def __init__(self, model: Transformer, num_requests: int, max_step_tokens: int) -> None:
        positions = model.config.max_positions - MAX_NODES - 1
        self.short, self.long = min(_SHORT, positions), min(_LONG, positions)
        self.num_requests = self._num = num_requests
        own = EngineLimits(
            max_running=num_requests,
            max_step_tokens=max_step_tokens,
            max_len=self.long + MAX_NODES + 1,
        )
        self._kv = make_kv(model, own)
        self._model, self._runner = model, ModelRunner(model, self._kv)

    def longer(self, num_tokens: int) -> float:
        """Return the seconds that a step of so many tokens takes more with long contexts."""
        far, near = (
            min(self.step(num_tokens, context) for _ in range(1 + _REPEATS))
            for context in (self.long, self.short)
        )
        return far - near

    def step(self, num_tokens: int, context: int) -> float:
        """Return the seconds of a step of so many tokens, with drafts where requests are few."""
        num = min(num_tokens, self._num)
        sizes = [num_tokens // num - 1 + (i < num_tokens % num) for i in range(num)]
        scheduled = []
        for i, size in enumerate(sizes):
            active = synthetic_request(f"{i}", context)
            assert self._kv.try_grow(active.request_id, context + 1 + size), "sized for this"
            scheduled.append(Scheduled(active=active, num_tokens=1, draft=_chain(size)))
        started = time.perf_counter()
        batch = flatten(scheduled, self._model.device)
        self._runner.launch(batch, scheduled, NO_TAPS).wait()
        return time.perf_counter() - started


def _chain(size: int) -> DraftTree:
    return DraftTree(tokens=(0,) * size, parents=tuple(range(size)), margins=(0.0,) * size)


def synthetic_request(name: str, context: int) -> ActiveRequest:
    """A request whose last token is to be computed behind `context` others."""
    sampling = SamplingParams(max_tokens=4 * MAX_NODES)
    tokens = [0] * (context + 1)
    request = Request(request_id=name, prompt_tokens=(0,), noise_key=len(name), sampling=sampling)
    return ActiveRequest(request=request, tokens=tokens, policy_version=0, num_computed=context)


def extend_texts(
    drafter: Drafter, model: Transformer, actives: Sequence[ActiveRequest], count: int
) -> None:
    """Let each request grow by so many tokens, and the drafter know all but the last one."""
    taps = drafter.taps
    size = (len(taps.layers) + taps.final) * model.config.hidden_size
    features = torch.zeros(len(actives) * count, size, dtype=model.dtype, device=model.device)
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
