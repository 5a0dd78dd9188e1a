"""Law 1 for tuners: no token depends on the tuner or on the clock that it reads.

Drafters are scripted and say how likely their nodes are, rightly or not, or are an EAGLE layer; the
clock makes up what steps take, so that tuners change their minds often.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import final

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.engine import profile
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import StepReport
from longtail.sampling import noise_key
from longtail.speculation.drafter import Draftable
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, keep_reached, prune, ranked
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.records import Batch, Plan
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner, merge_proposals
from longtail.types import Completion, Request
from support.drafters import RIGHT, WRONG, Script, ScriptedDrafter, ragged
from support.eagle_requests import make_layer
from support.engine_requests import known_texts, request_of
from support.tiny_models import tiny_model
from support.worked import reach_probabilities

ROOMY = EngineLimits(max_running=16, max_step_tokens=400, max_len=80)
TIGHT = EngineLimits(max_running=6, max_step_tokens=23, max_len=80, kv_tokens=192)
SCRIPTS: dict[str, Script] = {"right": RIGHT, "wrong": WRONG, "ragged": ragged(5)}
EAGLE = "eagle"
NEVER = 10**6
"""Steps between two swaps: more than a rollout has."""


@pytest.fixture(scope="module", autouse=True)
def _many_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "measure_steps", made_up_steps)
        patch.setattr(profile, "measure_drafts", made_up_drafts)
        yield


def made_up_steps(model: object, limits: object) -> CostModel:
    """Costs without measuring; every time the same."""
    return CostModel(TimeCurve((1, 8, 64), (1e-3, 1.5e-3, 6e-3)), pair_s=1e-7, node_pair_s=2e-8)


def made_up_drafts(*_: object) -> DraftCost:
    """Costs of any drafter."""
    return DraftCost(start_s=1e-5, request_s=1e-6, level_s=1e-5, row_s=1e-6)


@final
class MadeUpClock:
    """Seconds by a seed: steps of a millisecond, proposals of less, stalls of both."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._random.lognormvariate(-7.0, 1.5)
        return self._now


@final
class SureDrafter(ScriptedDrafter):
    """Says how likely its nodes are, by a seed, and honours what is asked of them."""

    def draft(self, requests, strategy, noise):
        trees = super().draft(requests, strategy, noise)
        return [
            self._sure(tree, each, strategy) for tree, each in zip(trees, requests, strict=True)
        ]

    def _sure(self, tree: DraftTree, request: Draftable, strategy: Strategy) -> DraftTree:
        rng = random.Random(f"{request.request_id}/{len(request.tokens)}")
        sure = [rng.choice((0.2, 0.7, 0.95, 1.0)) for _ in tree.tokens]
        reach = reach_probabilities(tree.parents, sure)
        tree = keep_reached(
            ranked(dataclasses.replace(tree, reach=reach)), strategy.thresholds.verify
        )
        return prune(tree, strategy.num_nodes)


def make_eagle() -> EagleDrafter:
    model = tiny_model(dtype=torch.float64)
    return EagleDrafter(make_layer(model, "eagle1"), model)


@final
class ErraticTuner(Tuner):
    """Anything that a tuner may do, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._num_drafters = 1

    def begin(self, costs, num_drafters):
        self._num_drafters = num_drafters

    def plan(self, batch: Batch) -> Plan:
        rng = self._random
        if rng.random() < 0.3:
            return Plan(strategy=None, is_probe=rng.random() < 0.5)
        width = rng.choice((1, 2, 3))
        strategy = Strategy(
            depth=rng.randint(1, 8), width=width, size=rng.randint(8, 20), beam=rng.choice((0, 1))
        )
        drafters = rng.sample(range(self._num_drafters), rng.randint(1, self._num_drafters))
        few = rng.choice((None, None, 1, 3))
        return Plan(strategy=strategy, drafters=tuple(sorted(drafters)), num_requests=few)

    def select_nodes(self, batch, plan, proposals):
        spent, room = [], batch.room
        for tree in merge_proposals(proposals):
            kept = prune(tree, min(self._random.randint(0, tree.size), room))
            spent.append(kept)
            room -= kept.size
        return spent


TUNERS = {
    "budget": lambda seed: BudgetTuner(),
    "fixed": lambda seed: FixedTuner(Strategy(depth=4, width=2, size=6), max_running=5),
    "off": lambda seed: OffTuner(),
    "erratic": ErraticTuner,
}


def make_requests() -> list[Request]:
    return [
        request_of(
            f"r{i}",
            ((5 * (i // 3) + 3 * j) % 128 for j in range(1 + 11 * (i // 3))),
            noise_key(3, i),
            str(i // 3),
            max_tokens=(30, 7, 22)[i % 3],
            temperature=(1.0, 0.0, 0.7)[i % 3],
        )
        for i in range(9)
    ]


def make_engine(limits: EngineLimits = ROOMY) -> RolloutEngine:
    return RolloutEngine(tiny_model("qwen3", dtype=torch.float64), lambda tokens: "", limits)


@functools.cache
def plain_texts() -> tuple[list[Completion], dict[str, tuple[int, ...]]]:
    """Return the texts, and their continuations beyond the ends."""
    requests, engine = make_requests(), make_engine()
    endless = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, max_tokens=45))
        for each in requests
    ]
    return engine.generate(requests), known_texts(endless, engine.generate(endless))


def written(completions: Sequence[Completion]) -> list[object]:
    """All but logprobs, whose sums are rounded in another order in another batch."""
    return [(each.request_id, each.tokens, each.finish_reason) for each in completions]


def speculation(
    tuner: Tuner, texts: dict[str, tuple[int, ...]], names: Sequence[str], clock: MadeUpClock
) -> Speculation:
    drafters = tuple(
        make_eagle() if name == EAGLE else SureDrafter(texts, SCRIPTS[name], informed=False)
        for name in names
    )
    return Speculation(drafters=drafters, tuner=tuner, clock=clock)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    tuners=st.lists(st.sampled_from(sorted(TUNERS)), min_size=1, max_size=4),
    names=st.lists(st.sampled_from([*sorted(SCRIPTS), EAGLE]), min_size=1, max_size=2),
    seed=st.integers(0, 1000),
    every=st.integers(1, 6) | st.just(NEVER),
    limits=st.sampled_from([ROOMY, TIGHT]),
)
@example(tuners=["budget"], names=[EAGLE], seed=2, every=NEVER, limits=TIGHT)
@example(tuners=["erratic"], names=["ragged", "right"], seed=2, every=NEVER, limits=TIGHT)
def test_no_tuner_changes_a_text_and_no_swap_of_tuners_and_drafters(
    tuners, names, seed, every, limits
):
    plain, texts = plain_texts()
    engine, done = make_engine(limits), {}
    for request in make_requests():
        engine.submit(request)
    step = 0
    while engine.num_unfinished:
        if step % every == 0:
            name = tuners[step // every % len(tuners)]
            tuner = TUNERS[name](seed + step)
            engine.speculate(speculation(tuner, texts, names, MadeUpClock(seed)))
        done |= {each.request_id: each for each in engine.step().finished}
        step += 1
    assert written([done[each.request_id] for each in plain]) == written(plain)
    assert engine.kv_usage().free == engine.kv_usage().total


def test_switching_computes_no_token_twice_and_frees_no_kv():
    """On, off, on: beside the nodes that were wrong, the flat tokens of plain decoding."""

    @final
    class Alternating(Tuner):
        def __init__(self) -> None:
            self._step = 0

        def plan(self, batch):
            self._step += 1
            strategy = Strategy(depth=3) if self._step % 2 else None
            return Plan(strategy=strategy)

    _, texts = plain_texts()
    counted = []
    for tuner in (OffTuner(), Alternating()):
        engine = make_engine()
        engine.speculate(speculation(tuner, texts, ["ragged"], MadeUpClock(1)))
        steps: list[StepReport] = []
        engine.generate(make_requests(), steps.append)
        drafted = sum(each.num_drafted for step in steps for each in step.verified)
        accepted = sum(each.num_accepted for step in steps for each in step.verified)
        flat = sum(step.num_tokens for step in steps)
        counted.append((flat - drafted + accepted, accepted > 0))
    assert counted[0][1] is False
    assert counted[1][1] is True
    # A last draft may be accepted past the end of a text; nothing else is computed more often.
    assert 0 <= counted[1][0] - counted[0][0] <= 3 * len(texts)
