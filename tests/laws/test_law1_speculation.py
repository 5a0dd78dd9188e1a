"""Law 1: a text is a function of weights, prompt and key, and speculation never changes it.

With any drafter, tree, tuner, clock and switching. Plain texts are those of the definition,
`fakes.write_plainly`: one request, everything recomputed for every token.

Exact in float64; to the bit in float32 and bfloat16 on native kernels (test_law4_bits.py), and with
other products the share of texts that differ is bounded (there, too).

Drafters are scripted (tests/support/drafters.py): they know how the texts go on, so trees are
right, wrong or mixed on purpose, and run on behind the end of a text as if it went on. Clocks make
up what steps take, so that tuners change their minds often.
"""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.engine import profile
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import StepReport
from longtail.model.transformer import Family
from longtail.sampling import noise_key
from longtail.speculation.drafter import Draftable
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, keep_reached, prune, ranked
from longtail.tuner.budget_tuner import BudgetTuner
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.messages import Batch, Plan
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner, merge_proposals
from longtail.types import Completion, FinishReason, Request
from support.drafters import RIGHT, WRONG, Script, ScriptedDrafter, Sketch, chain, listed, ragged
from support.eagle_requests import make_layer
from support.engine_requests import FAMILIES, known_texts, request_of
from support.fakes import write_plainly
from support.tiny_models import tiny_model
from support.worked import reach_probabilities

TREE = Strategy(depth=6, width=3, size=9)
DISTRIBUTIONS = (
    {}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.05}, {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.2, "top_k": 7},
)  # fmt: skip
PROMPTS = (
    tuple((7 * j) % 128 for j in range(1, 28)),
    (1,),
    tuple((3 * j) % 128 for j in range(29)),
)
ROOMY = EngineLimits(max_running=16, max_step_tokens=400, max_len=80)


def decode(tokens: Sequence[int]) -> str:
    return "".join(map(chr, tokens))


def make_engine(family: Family, limits: EngineLimits = ROOMY) -> RolloutEngine:
    return RolloutEngine(tiny_model(family, dtype=torch.float64, head_dim=16), decode, limits)


@dataclass(frozen=True, slots=True)
class Task:
    """Requests, what plain decoding makes of them, and how their texts would go on for ever."""

    requests: tuple[Request, ...]
    plain: tuple[Completion, ...]
    texts: dict[str, tuple[int, ...]]


def write_on(engine: RolloutEngine, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    """Prompt and text of each request, were it not to end."""
    endless = [
        dataclasses.replace(
            each,
            sampling=dataclasses.replace(each.sampling, stop=(), stop_token_ids=(), max_tokens=40),
        )
        for each in requests
    ]
    return known_texts(endless, engine.generate(endless))


def ends(text: Sequence[int]) -> tuple[dict[str, object], ...]:
    """Ways for a text to end, most of them inside what a drafter will propose."""
    return (
        {"max_tokens": 1},
        {"max_tokens": 2, "stop_token_ids": (text[1],)},
        {"max_tokens": 3},
        {"max_tokens": 21},
        {"max_tokens": 25, "stop_token_ids": (text[9], text[11])},
        {"max_tokens": 25, "stop": ("\x80", decode(text[6:9]))},
    )


@functools.cache
def task(family: Family) -> Task:
    """Every distribution with two ends; two keys of the first prompt are a group."""
    bare = [
        request_of(
            f"r{i}",
            PROMPTS[i % 4 % 3],
            noise_key(1, i),
            "first" if i % 4 % 3 == 0 else "",
            **DISTRIBUTIONS[i % 6],
        )
        for i in range(12)
    ]
    texts = write_on(make_engine(family), bare)
    requests = []
    for i, each in enumerate(bare):
        end = ends(texts[each.request_id][len(each.prompt_tokens) :])[(i + i // 6) % 6]
        sampling = dataclasses.replace(each.sampling, **end)
        requests.append(dataclasses.replace(each, sampling=sampling))
    plain = make_engine(family).generate(requests)
    assert {done.finish_reason for done in plain} == {FinishReason.STOP, FinishReason.LENGTH}
    return Task(tuple(requests), tuple(plain), texts)


def assert_same_texts(written: Sequence[Completion], plain: Sequence[Completion]) -> None:
    """float64 sums in another order: 1e-16 an operation, some hundreds of them."""
    for one, other in zip(written, plain, strict=True):
        assert one.request_id == other.request_id
        assert one.tokens == other.tokens
        assert one.finish_reason == other.finish_reason
        assert one.text == other.text
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-12, rel=0.0)


def write(
    engine: RolloutEngine, requests: Sequence[Request]
) -> tuple[list[Completion], list[StepReport]]:
    steps: list[StepReport] = []
    written = engine.generate(requests, steps.append)
    assert engine.kv_usage().free == engine.kv_usage().total
    return written, steps


DRAFTERS: dict[str, Script] = {
    "all right": RIGHT,
    "all wrong": WRONG,
    "wrong, then right": chain(1, 0),
    "ragged": ragged(0),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name", "heedless"),
    [
        *(("mistral", name, False) for name in DRAFTERS),
        *(("mistral", name, True) for name in ("all right", "ragged")),
        *((each, "ragged", each != "qwen2") for each in FAMILIES if each != "mistral"),
    ],
)
def test_no_drafter_changes_a_text(family, name, heedless):
    """Mixed temperatures, truncations, ends and prompts in one batch.

    Heedless drafts are deeper than max_tokens, and deeper than mistral's window of 8 allows.
    """
    given, engine = task(family), make_engine(family)
    drafter = ScriptedDrafter(given.texts, DRAFTERS[name], heedless=heedless)
    shape = Strategy(depth=12, size=12) if heedless else TREE
    engine.speculate(Speculation.fixed(drafter, shape))
    written, steps = write(engine, given.requests)
    assert_same_texts(written, given.plain)
    assert not drafter.memories, "told of every end"
    assert drafter.num_restarts == 0
    assert drafter.num_drafts == sum(len(step.verified) for step in steps)
    for step in steps:
        kept = Counter(each.request_id for each in step.emitted)  # not those behind a text's end
        assert all(each.num_accepted == kept[each.request_id] - 1 for each in step.verified)
    if name == "all right":
        assert drafter.num_accepted == drafter.num_nodes > 0
    elif name == "all wrong":
        assert drafter.num_nodes > drafter.num_accepted == 0
    elif name == "ragged":
        assert drafter.num_nodes > drafter.num_accepted > 0


LIMITS = {
    # Drafts get what prefill and decoding leave over, often a node each or none.
    "small steps": EngineLimits(max_running=8, max_step_tokens=11, max_len=80),
    "one at a time": EngineLimits(max_running=1, max_step_tokens=5, max_len=80),
    "little memory": EngineLimits(max_running=6, max_step_tokens=60, max_len=80, kv_tokens=128),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_writes_what_the_definition_writes(family):
    """In small steps, which cut the prompts; the definition knows no stop strings."""
    requests = [
        dataclasses.replace(each, sampling=dataclasses.replace(each.sampling, stop=()))
        for each in task(family).requests
    ]
    engine = make_engine(family, LIMITS["small steps"])
    for request, done in zip(requests, engine.generate(requests), strict=True):
        tokens, logprobs = write_plainly(engine.model, request)
        assert done.tokens == tokens
        # float64 sums in another order: 1e-16 an operation, some hundreds of them.
        assert done.logprobs == pytest.approx(logprobs, abs=1e-12)


SKETCHES = st.lists(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=14).map(
        lambda nodes: Sketch(
            tuple(parent % (i + 1) for i, (parent, _) in enumerate(nodes)),
            tuple(offset for _, offset in nodes),
        )
    ),
    min_size=1,
    max_size=4,
)


@final
class SureDrafter(ScriptedDrafter):
    """Says how likely its nodes are, by a seed, rightly or not."""

    def draft(self, requests, strategy, noise):
        trees = super().draft(requests, strategy, noise)
        return [
            self._sure(tree, each, strategy) for tree, each in zip(trees, requests, strict=True)
        ]

    def _sure(self, tree: DraftTree, request: Draftable, strategy: Strategy) -> DraftTree:
        rng = random.Random(f"{request.request_id}/{len(request.tokens)}")
        sure = [rng.choice((0.2, 0.7, 0.95, 1.0)) for _ in tree.tokens]
        likely = dataclasses.replace(tree, reach=reach_probabilities(tree.parents, sure))
        kept = keep_reached(ranked(likely), strategy.thresholds.verify)
        return prune(kept, strategy.num_nodes)


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


@final
class MadeUpClock:
    """Seconds by a seed: steps of a millisecond, proposals of less, stalls of both."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._random.lognormvariate(-7.0, 1.5)
        return self._now


@pytest.fixture(autouse=True)
def _made_up_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure nothing."""
    curve = TimeCurve((1, 8, 64), (1e-3, 1.5e-3, 6e-3))
    costs = CostModel(curve, pair_s=1e-7, node_pair_s=2e-8)
    draft = DraftCost(start_s=1e-5, request_s=1e-6, level_s=1e-5, row_s=1e-6)
    monkeypatch.setattr(profile, "measure_steps", lambda *_: deepcopy(costs))
    monkeypatch.setattr(profile, "measure_drafts", lambda *_: draft)


TUNERS = {
    "budget": lambda seed: BudgetTuner(),
    "erratic": ErraticTuner,
    "off": lambda seed: OffTuner(),
    "tree": lambda seed: FixedTuner(TREE),
    "few": lambda seed: FixedTuner(Strategy(depth=1), max_running=4),
    "wide": lambda seed: FixedTuner(Strategy(depth=12, width=4, size=14)),
}
TURNS = st.builds(
    SimpleNamespace,
    drafters=st.sampled_from([(), (0,), (1,), (2,), (3,), (4,), (1, 3), (0, 4), (3, 2)]),
    tuner=st.sampled_from(sorted(TUNERS)),
    coupled=st.booleans(),
    leaves=st.sampled_from([None, None, *range(12)]),
    returns=st.booleans(),
)
"""Events before a step: other drafters (none: plain decoding), an abort, a request that returns."""


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(FAMILIES),
    sketches=SKETCHES,
    turns=st.dictionaries(st.integers(0, 25), TURNS, max_size=8),
    first=TURNS,
    arrivals=st.lists(st.sampled_from([0, 0, *range(25)]), min_size=12, max_size=12),
    limits=st.sampled_from([ROOMY, *LIMITS.values()]),
)
def test_nothing_that_happens_between_steps_changes_a_text(
    family, sketches, turns, first, arrivals, limits
):
    """Trees as hypothesis likes them; drafters come, go and come back, and so do requests."""
    given, engine = task(family), make_engine(family, limits)
    drafters = [
        *(
            ScriptedDrafter(given.texts, script, heedless=True, informed=False)
            for script in (listed(sketches), RIGHT, ragged(2))
        ),
        SureDrafter(given.texts, ragged(5), informed=False),
        EagleDrafter(make_layer(engine.model, "eagle1"), engine.model),
    ]
    plain = {done.request_id: done for done in given.plain}
    done: dict[str, Completion] = {}
    pending = sorted(zip(arrivals, range(12), strict=True))
    turns, step = {**turns, 0: first}, 0
    while pending or engine.num_unfinished:
        while pending and pending[0][0] <= step:
            engine.submit(given.requests[pending.pop(0)[1]])
        if (turn := turns.get(step)) is not None:
            speculation = Speculation(
                drafters=tuple(drafters[each] for each in turn.drafters),
                tuner=TUNERS[turn.tuner](step),
                coupled=turn.coupled,
                clock=MadeUpClock(step),
            )
            engine.speculate(speculation if turn.drafters else None)
            if turn.leaves is not None:
                request = given.requests[turn.leaves]
                if engine.is_unfinished(request.request_id):
                    engine.abort(request.request_id)
                    if turn.returns:
                        engine.submit(request)
        if engine.num_unfinished:
            done.update((each.request_id, each) for each in engine.step().finished)
        step += 1
    assert engine.kv_usage().free == engine.kv_usage().total
    assert_same_texts([*done.values()], [plain[name] for name in done])


def test_switching_computes_no_token_twice():
    """On, off, on: beside the nodes that were wrong, the flat tokens of plain decoding."""

    @final
    class Alternating(Tuner):
        def __init__(self) -> None:
            self._step = 0

        def plan(self, batch):
            self._step += 1
            return Plan(strategy=Strategy(depth=3) if self._step % 2 else None)

    given, counted = task("qwen3"), []
    for tuner in (OffTuner(), Alternating()):
        engine = make_engine("qwen3")
        drafter = ScriptedDrafter(given.texts, ragged(5), informed=False)
        engine.speculate(Speculation(drafters=(drafter,), tuner=tuner, clock=MadeUpClock(1)))
        _, steps = write(engine, given.requests)
        drafted = sum(each.num_drafted for step in steps for each in step.verified)
        accepted = sum(each.num_accepted for step in steps for each in step.verified)
        counted.append((sum(step.num_tokens for step in steps) - drafted + accepted, accepted > 0))
    (plain, off), (switched, on) = counted
    assert (off, on) == (False, True)
    # A last draft may be accepted past the end of a text; nothing else is computed more often.
    assert 0 <= switched - plain <= 3 * len(given.texts)
