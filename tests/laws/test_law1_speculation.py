"""Law 1: speculation never changes a text: with any drafter, tree and switching, the plain one's.

Exact in float64; to the bit in float32 and bfloat16 on native kernels (test_law4_bits.py), and with
other products the share of texts that differ is bounded (there, too).

The plain texts are the engine's own, which test_law1_plain_decoding.py holds to the definition.
Drafters are scripted (tests/support/drafters.py): they know how the texts go on, so trees are
right, wrong or mixed on purpose, and run on behind the end of a text as if it went on.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import StepReport
from longtail.model.transformer import Family
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, FinishReason, Request
from support.drafters import RIGHT, WRONG, Script, ScriptedDrafter, Sketch, chain, listed, ragged
from support.engine_requests import known_texts, request_of
from support.tiny_models import tiny_model

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
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


TURNS = st.builds(
    SimpleNamespace,
    drafter=st.sampled_from([None, 0, 1, 2]),
    shape=st.sampled_from([TREE, Strategy(depth=1), Strategy(depth=12, width=4, size=14)]),
    coupled=st.booleans(),
    max_running=st.sampled_from([0, 0, 4]),
    leaves=st.sampled_from([None, None, *range(12)]),
    returns=st.booleans(),
)
"""Events before a step: another drafter (None: none), an abort, and a request that returns."""


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
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
        ScriptedDrafter(given.texts, script, heedless=True, informed=False)
        for script in (listed(sketches), RIGHT, ragged(2))
    ]
    plain = {done.request_id: done for done in given.plain}
    done: dict[str, Completion] = {}
    pending = sorted(zip(arrivals, range(12), strict=True))
    turns, clock = {**turns, 0: first}, 0
    while pending or engine.num_unfinished:
        while pending and pending[0][0] <= clock:
            engine.submit(given.requests[pending.pop(0)[1]])
        if (turn := turns.get(clock)) is not None:
            speculation = None
            if turn.drafter is not None:
                speculation = Speculation.fixed(
                    drafters[turn.drafter],
                    turn.shape,
                    coupled=turn.coupled,
                    max_running=turn.max_running,
                )
            engine.speculate(speculation)
            if turn.leaves is not None:
                request = given.requests[turn.leaves]
                if engine.is_unfinished(request.request_id):
                    engine.abort(request.request_id)
                    if turn.returns:
                        engine.submit(request)
        if engine.num_unfinished:
            done.update((each.request_id, each) for each in engine.step().finished)
        clock += 1
    assert engine.kv_usage().free == engine.kv_usage().total
    assert_same_texts([*done.values()], [plain[name] for name in done])
