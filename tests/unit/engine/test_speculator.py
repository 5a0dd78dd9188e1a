"""Speculation in the engine: proposals, the tokens that drafters observe, late feedback."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.runner import ModelRunner
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.weights import hf_rows
from longtail.model.transformer import Family
from longtail.speculation.drafter import Draftable, Taps
from longtail.speculation.strategy import Strategy
from longtail.tuner.messages import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner
from longtail.types import Request
from support.drafters import RIGHT, Memory, ScriptedDrafter, Sketch, ragged
from support.engine_requests import (
    CROWDED,
    ROOMY,
    TREE,
    features_of,
    known_texts,
    make_requests,
    request_of,
)
from support.fakes import scripted_model
from support.tiny_models import tiny_model

pytestmark = pytest.mark.many_steps
_LAST = TREE.depth + 3
"""Tokens of the last steps, which no proposal follows: drafters do not observe them."""
FEATURES = (Taps(final=True), Taps(layers=(0, 1)), Taps(layers=(1,), final=True))


def write_plainly(family: Family, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    engine = RolloutEngine(tiny_model(family, dtype=torch.float64), str, ROOMY)
    return known_texts(requests, engine.generate(requests))


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
    ("family", "taps", "script", "limits", "prompts"),
    [
        ("llama", FEATURES[0], RIGHT, ROOMY, "apart"),
        ("mistral", FEATURES[1], ragged(3), ROOMY, "apart"),
        ("qwen3", FEATURES[2], ragged(4), CROWDED, "apart"),
        ("qwen3", FEATURES[0], ragged(4), CROWDED, "grouped"),
    ],
)
def test_a_drafter_observes_each_token_once_with_its_features(
    family, taps, script, limits, prompts
):
    """Tokens are in order, with accepted nodes and no others; recomputed ones come again.

    Preempted requests start again, siblings after the shared prompt.
    """
    requests = make_requests(prompts, max_tokens=20)
    texts = write_plainly(family, requests)
    engine = RolloutEngine(tiny_model(family, dtype=torch.float64), str, limits)
    drafter = ScriptedDrafter(texts, script, taps=taps)
    engine.speculate(Speculation.fixed(drafter, TREE))
    engine.generate(requests)
    counts = engine.scheduler
    assert drafter.num_accepted > 0
    assert (drafter.num_restarts > 0) == (limits is CROWDED)
    assert drafter.num_restarts <= counts.num_preemptions
    assert (counts.num_shared_tokens > 0) == (prompts == "grouped")
    assert sorted(name for name, _ in drafter.gone) == sorted(texts)
    for name, memory in drafter.gone:
        shared = len(next(r for r in requests if r.request_id == name).prompt_tokens)
        assert memory.start in ((0, shared - 1, shared) if prompts == "grouped" else (0,))
        assert memory.end >= len(texts[name]) - _LAST, "all but the last steps'"
        assert_true_to_the_text(memory, family, texts[name], taps)


def test_a_drafter_added_later_observes_all_later_tokens():
    requests, taps = make_requests(), FEATURES[1]
    texts = write_plainly("mistral", requests)
    engine = RolloutEngine(tiny_model("mistral", dtype=torch.float64), str, ROOMY)
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
    engine = RolloutEngine(tiny_model(family, dtype=torch.float64), str, limits)
    engine.speculate(Speculation.fixed(drafter, TREE, **speculation))
    return engine, questions


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


@pytest.mark.parametrize("removed", [False, True])
def test_a_drafter_keeps_no_finished_request_and_follows_new_weights(removed):
    """Otherwise its state grows, and a reused id matches an old request."""
    engine, _ = asking()
    (drafter,) = engine.speculation.drafters
    for request in make_requests()[:3]:
        engine.submit(request)
    engine.step()
    engine.step()
    assert drafter.memories.keys() == {"r0", "r1", "r2"}
    engine.abort("r1")
    engine.step()
    assert drafter.memories.keys() == {"r0", "r2"}
    if removed:
        engine.speculate(None)
    while engine.num_unfinished:
        engine.step()
    assert not drafter.memories
    before = drafter.num_refreshes
    other = tiny_model("llama", seed=1, dtype=torch.float64)
    engine.load_policy(1, hf_rows(other).items())
    assert drafter.num_refreshes == before + (not removed)


class Turns(Tuner):
    """Drafts in two steps of three, and keeps the outcomes."""

    def __init__(self, log: list[str]) -> None:
        self._log, self._step = log, 0
        self.outcomes: list[Outcome] = []

    def plan(self, batch: Batch) -> Plan:
        self._step += 1
        return Plan(strategy=Strategy(depth=2) if self._step % 3 else None)

    def learn(self, outcome: Outcome) -> None:
        self._log.append("learn")
        self.outcomes.append(outcome)


def test_feedback_is_applied_once_the_next_step_is_computed(monkeypatch: pytest.MonkeyPatch):
    """The last feedback is applied when no request is left."""
    log: list[str] = []
    true = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda *args: log.append("run") or true(*args))
    engine = RolloutEngine(scripted_model(60), str, ROOMY)
    texts = dict.fromkeys("ab", range(60))
    drafter = ScriptedDrafter(texts, RIGHT, vocab_size=60, informed=False)
    tuner = Turns(log)
    engine.speculate(Speculation(drafters=(drafter,), tuner=tuner, guarded=False))
    for name in ("a", "b"):
        engine.submit(request_of(name, (0, 1), max_tokens=30))
    steps = []
    while engine.num_unfinished:
        steps.append(engine.step())
    assert log == ["run", *["run", "learn"] * (len(steps) - 1), "learn"]
    for outcome, step in zip(tuner.outcomes, steps, strict=True):
        assert outcome.num_nodes == sum(each.num_drafted for each in step.verified)
        assert outcome.num_emitted == len(step.emitted)
    assert sum(outcome.num_nodes for outcome in tuner.outcomes) > 0
