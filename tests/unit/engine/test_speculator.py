"""Speculation in the engine: proposals, and the tokens that drafters observe."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import Verified
from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Family
from longtail.speculation.drafter import Draftable, Taps
from longtail.speculation.strategy import Strategy
from longtail.types import Request, SamplingParams
from support.drafters import RIGHT, Memory, ScriptedDrafter, Sketch, listed, ragged
from support.engine_requests import CROWDED, ROOMY, TREE, features_of, make_requests, write
from support.fakes import scripted_model, unchecked_shapes
from support.tiny_models import tiny_model

_LAST = TREE.depth + 3
"""Tokens of the last steps, which no proposal follows: drafters do not observe them."""
FEATURES = (Taps(final=True), Taps(layers=(0, 1)), Taps(layers=(1,), final=True))


@pytest.fixture(scope="module", autouse=True)
def _many_steps() -> Iterator[None]:
    with unchecked_shapes():
        yield


def nothing(tokens: Sequence[int]) -> str:
    return ""


def write_plainly(family: Family, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    engine = RolloutEngine(tiny_model(family, dtype=torch.float64), nothing, ROOMY)
    texts = write(engine, requests)
    return {request.request_id: text for request, text in zip(requests, texts, strict=True)}


def assert_true_to_the_text(
    memory: Memory, family: Family, text: Sequence[int], taps: Taps
) -> None:
    """Token by token: the feature of x_i is what the target computes at x_i, for each i observed.

    The original paired features with the token after them, one place off, and nothing failed.
    """
    assert memory.tokens == list(text[memory.start : memory.end])
    model = tiny_model(family, dtype=torch.float64)
    exact = features_of(model, text, taps)[memory.start : memory.end]
    torch.testing.assert_close(torch.stack(memory.features), exact, rtol=0.0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "taps"), list(zip(("llama", "mistral", "qwen3"), FEATURES, strict=True))
)
def test_a_drafter_observes_each_token_once_with_its_features(family, taps):
    """Tokens are in order from the first one, with accepted nodes and no others."""
    requests = make_requests()
    texts = write_plainly(family, requests)
    for script in (RIGHT, ragged(3)):
        engine = RolloutEngine(tiny_model(family, dtype=torch.float64), nothing, ROOMY)
        drafter = ScriptedDrafter(texts, script, taps=taps)
        engine.speculate(Speculation.fixed(drafter, TREE))
        engine.generate(requests)
        assert drafter.num_accepted > 0
        assert drafter.num_restarts == 0
        assert sorted(name for name, _ in drafter.gone) == sorted(texts)
        for name, memory in drafter.gone:
            assert memory.start == 0
            assert memory.end >= len(texts[name]) - _LAST, "all but the last steps'"
            assert_true_to_the_text(memory, family, texts[name], taps)


@pytest.mark.slow
@pytest.mark.parametrize("grouped", [False, True], ids=["apart", "grouped"])
def test_recomputed_tokens_are_observed_again(grouped):
    """Preempted requests start again, siblings after the shared prompt."""
    requests, taps = make_requests("grouped" if grouped else "apart", max_tokens=20), FEATURES[0]
    texts = write_plainly("qwen3", requests)
    engine = RolloutEngine(tiny_model("qwen3", dtype=torch.float64), nothing, CROWDED)
    drafter = ScriptedDrafter(texts, ragged(4), taps=taps)
    engine.speculate(Speculation.fixed(drafter, TREE))
    engine.generate(requests)
    counts = engine.scheduler
    assert 0 < drafter.num_restarts <= counts.num_preemptions
    assert (counts.num_shared_tokens > 0) == grouped
    assert len(drafter.gone) == len(requests)
    for name, memory in drafter.gone:
        shared = len(next(r for r in requests if r.request_id == name).prompt_tokens)
        assert memory.start in ((0, shared - 1, shared) if grouped else (0,))
        assert memory.end >= len(texts[name]) - _LAST
        assert_true_to_the_text(memory, "qwen3", texts[name], taps)


def test_a_drafter_added_later_observes_all_later_tokens():
    requests, taps = make_requests(), FEATURES[1]
    texts = write_plainly("mistral", requests)
    engine = RolloutEngine(tiny_model("mistral", dtype=torch.float64), nothing, ROOMY)
    drafters = [ScriptedDrafter(texts, ragged(i), taps=taps, informed=i < 1) for i in range(2)]
    for request in requests:
        engine.submit(request)
    first, second = (Speculation.fixed(drafter, TREE) for drafter in drafters)
    changes = {3: first, 6: second, 7: None, 8: second}
    for step in range(40):
        if step in changes:
            engine.speculate(changes[step])
            assert engine.speculation is changes[step]
        if engine.num_unfinished:
            engine.step()
    for drafter in drafters:
        assert drafter.num_nodes > 0
        told = [*drafter.gone, *drafter.memories.items()]
        assert len(told) >= 5
        for name, memory in told:
            assert_true_to_the_text(memory, "mistral", texts[name], taps)


class Question(NamedTuple):
    """One request as a drafter saw it."""

    request_id: str
    num_tokens: int
    max_depth: int
    strategy: Strategy


def asking(
    limits: EngineLimits = ROOMY, family: Family = "llama", **speculation: object
) -> tuple[RolloutEngine, list[Question]]:
    """An engine whose drafter proposes nothing, and the list of its calls."""
    questions: list[Question] = []

    def sketch(request: Draftable, strategy: Strategy) -> Sketch:
        name, count = request.request_id, len(request.tokens)
        questions.append(Question(name, count, request.max_depth, strategy))
        return Sketch()

    drafter = ScriptedDrafter({f"r{i}": () for i in range(9)}, sketch)
    engine = RolloutEngine(tiny_model(family, dtype=torch.float64), nothing, limits)
    engine.speculate(Speculation.fixed(drafter, TREE, **speculation))
    return engine, questions


def drafter_in(engine: RolloutEngine) -> ScriptedDrafter:
    assert engine.speculation is not None
    drafter = engine.speculation.drafters[0]
    assert isinstance(drafter, ScriptedDrafter)
    return drafter


@pytest.mark.parametrize(("family", "deepest"), [("llama", 62), ("mistral", 7)])
def test_drafts_are_no_deeper_than_they_can_be_used(family, deepest):
    """The root yields a token, too; a window of 8 places holds a root and 7 nodes behind it."""
    engine, questions = asking(family=family)
    request = make_requests(max_tokens=10)[3]
    engine.generate([request])
    prompt_len = len(request.prompt_tokens)
    # The prompt's own step draws the first token; the last token needs no draft.
    assert [each.num_tokens for each in questions] == [prompt_len + i for i in range(1, 9)]
    assert [each.max_depth for each in questions] == [
        min(left, deepest) for left in range(8, 0, -1)
    ]


@pytest.mark.parametrize(
    ("max_step_tokens", "shapes"),
    [
        (11, ([2], [4])),  # 8 spare tokens are 2 for each of 3; 9 are 4 for each of 2
        (5, ([], [1])),  # 2 spare tokens are none for each of 3; 3 are 1 for each of 2
    ],
)
def test_the_spare_tokens_of_a_step_are_shared_out_and_never_exceeded(max_step_tokens, shapes):
    limits = EngineLimits(max_running=3, max_step_tokens=max_step_tokens, max_len=64)
    engine, questions = asking(limits)
    for request in make_requests()[:3]:  # prompts of one token: each is drafted for at once
        engine.submit(request)
    for names, sizes in zip((["r0", "r1", "r2"], ["r0", "r1"]), shapes, strict=True):
        engine.step()
        assert [each.request_id for each in questions] == (names if sizes else [])
        found = {(each.strategy.depth, each.strategy.num_nodes) for each in questions}
        assert found == {(size, size) for size in sizes}
        questions.clear()
        if len(names) == 3:
            engine.abort("r2")


def test_no_draft_is_proposed_in_steps_above_max_running():
    engine, questions = asking(max_running=2)
    for request in make_requests()[:3]:
        engine.submit(request)
    engine.step()
    assert not questions
    engine.abort("r1")
    engine.step()
    assert {each.request_id for each in questions} == {"r0", "r2"}


def test_a_step_reports_the_result_of_each_draft():
    """tree.py's running example over a model that counts: 1a and 3c are right, 2b and 4d wrong."""
    sketch = Sketch((0, 0, 1, 3), (0, 1, 0, 2))
    engine = RolloutEngine(scripted_model(40), nothing, ROOMY)
    drafter = ScriptedDrafter({"a": range(40)}, listed([sketch]), vocab_size=40)
    engine.speculate(Speculation.fixed(drafter, TREE))
    sampling = SamplingParams(max_tokens=8)
    engine.submit(Request(request_id="a", prompt_tokens=(0, 1), noise_key=0, sampling=sampling))
    assert engine.step().verified == ()
    for position in (1, 4):
        step = engine.step()
        assert step.verified == (
            Verified(request_id="a", position=position, num_drafted=4, depth=3, num_accepted=2),
        )
        assert [each.token for each in step.emitted] == [position + i for i in (2, 3, 4)]
        assert step.num_tokens == 5
        assert step.num_running == 1
        assert step.draft_s > 0


def test_finished_requests_are_forgotten_and_new_weights_are_followed():
    engine, _ = asking()
    drafter = drafter_in(engine)
    for request in make_requests()[:3]:
        engine.submit(request)
    engine.step()
    engine.step()
    assert drafter.memories.keys() == {"r0", "r1", "r2"}
    engine.abort("r1")
    engine.step()
    assert drafter.memories.keys() == {"r0", "r2"}
    while engine.num_unfinished:
        engine.step()
    assert not drafter.memories
    before = drafter.num_refreshes
    other = tiny_model("llama", seed=1, dtype=torch.float64)
    engine.load_policy(1, hf_rows(other).items())
    assert drafter.num_refreshes == before + 1


def test_a_removed_drafter_keeps_no_finished_request():
    """Otherwise its state grows, and a reused id matches an old request."""
    engine, _ = asking()
    drafter = drafter_in(engine)
    for request in make_requests()[:3]:
        engine.submit(request)
    engine.step()
    engine.speculate(None)
    while engine.num_unfinished:
        engine.step()
    assert not drafter.memories
