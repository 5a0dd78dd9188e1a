"""Dynamic sampling: a batch is filled up with groups whose rewards differ."""

import hashlib
import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.cluster.records import RolloutResult
from longtail.config.rl import RunConfig, load
from longtail.errors import GradingError
from longtail.loop import TrainingStep
from longtail.rl.advantage import refill_size
from longtail.rl.data.prompts import PromptSet, PromptSource
from longtail.rl.grading.pool import GraderPool
from longtail.rl.learner_metrics import LearnerMetrics, LearnerReport
from longtail.run.step_metrics import StepRecord
from longtail.system.stopwatch import Stopwatch
from longtail.types import Prompt, SamplingParams
from support.rollouts import completion, graders

WANTED, SAMPLES = 4, 3


def _reward(request_id: str, easy: int) -> float:
    """Draw 0 or 1 for a request; with a larger `easy` more groups are all 0."""
    return float(hashlib.sha256(request_id.encode()).digest()[0] % easy == 0)


class _Workers:
    """A group of workers that writes empty completions and learns nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def rollout(self, step: int, requests: Any, groups: Any) -> Any:
        self.calls.append(f"rollout {len(requests)}")
        completions = [completion(each.request_id, (1,)) for each in requests]
        return RolloutResult(completions=tuple(completions), shards=(), spots=(), seconds=1.0)

    def learn(self, batches: Any) -> LearnerReport:
        self.calls.append(f"learn {sum(each.num_sequences for each in batches)}")
        return LearnerMetrics().report(1, [])

    def publish(self) -> None:
        self.calls.append("publish")

    def train_drafter(self) -> None: ...

    def offer_drafter(self) -> None:
        self.calls.append("offer")


def _grader(easy: int, failing: str = "none") -> GraderPool:
    """Return a pool in which completions that begin with `failing` fail."""
    return graders(lambda name: None if name.startswith(failing) else _reward(name, easy))


def _config(*words: str) -> RunConfig:
    sizes = [f"--rollout.prompts_per_step={WANTED}", f"--rollout.group_size={SAMPLES}"]
    return load(None, ["--learner.loss=dapo", *sizes, *words])


def _source(seed: int = 0) -> PromptSource:
    rows = tuple(range(40))
    prompts = [Prompt(prompt_id=f"p/{number}", tokens=(1,), text="") for number in rows]
    return PromptSource(PromptSet(source="s", prompts=tuple(prompts), rows=rows), seed=seed)


def _step(source: PromptSource, grader: GraderPool, *words: str) -> tuple[TrainingStep, _Workers]:
    workers = _Workers()
    components = SimpleNamespace(source=source, workers=workers, sampling=SamplingParams())
    step: Any = object.__new__(TrainingStep)  # the parts are stand-ins of other types
    fields = {
        "config": _config(*words), "components": components, "grader": grader,
        "phase": lambda *_, **__: nullcontext(), "watch": Stopwatch(),
    }  # fmt: skip
    for name, value in fields.items():
        object.__setattr__(step, name, value)
    return step, workers


def _visits(step: TrainingStep, record: StepRecord) -> list[str]:
    """Return the groups that were learned from, by prompt and epoch."""
    groups = step._learnable(record.rounds)
    return [group.rollouts[0].completion.request_id.rpartition("#")[0] for group in groups]


def _expected(seed: int, easy: int, steps: int) -> list[list[str]]:
    """Take prompts one after another until the batch is full; sampled surplus is lost."""
    source, batches = _source(seed), []
    for _ in range(steps):
        batch: list[str] = []
        sampled, size = 0, WANTED
        while size:
            for taken in source.take(size):
                visit = f"{taken.prompt.prompt_id}@{taken.epoch}"
                rewards = {_reward(f"{visit}#{sample}", easy) for sample in range(SAMPLES)}
                batch += [visit] if len(rewards) == 2 else []
            sampled += size
            size = refill_size(wanted=WANTED, informative=len(batch), sampled=sampled)
        batches.append(batch[:WANTED])
    return batches


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 50), st.integers(2, 6), st.integers(0, 3))
def test_a_batch_has_exactly_the_first_groups_with_an_advantage(seed, easy, cut) -> None:
    words = ["--learner.max_refills=1000"]
    step, workers = _step(_source(seed), _grader(easy), *words)
    batches = []
    for number in range(3):
        if number == cut:  # killed and resumed from the cursor between two steps
            cursor = json.loads(json.dumps(step.components.source.state()))
            source = _source(seed)
            source.restore(cursor)
            step, workers = _step(source, _grader(easy), *words)
        record = step.run(number + 1)
        batches.append(_visits(step, record))
        assert record.num_learned == WANTED
        assert workers.calls[-3:] == [f"learn {WANTED * SAMPLES}", "publish", "offer"]
        assert record.shortage(WANTED, 1000) == []
    assert batches == _expected(seed, easy, 3)


def test_a_batch_that_stays_short_is_learned_and_named() -> None:
    step, workers = _step(_source(), _grader(10**6), "--learner.max_refills=2")
    record = step.run(1)
    sampled = f"rollout {WANTED * SAMPLES}"
    assert workers.calls == [sampled, sampled, sampled, "learn 0", "publish", "offer"]
    assert (record.num_learned, len(record.groups)) == (0, 3 * WANTED)
    assert len(record.shortage(WANTED, 2)) == 1


@pytest.mark.parametrize("word", ["--learner.max_refills=0", "--learner.dynamic_sampling=false"])
def test_without_refills_a_step_samples_once(word: str) -> None:
    step, workers = _step(_source(), _grader(10**6), word)
    record = step.run(1)
    assert [call for call in workers.calls if call.startswith("rollout")] == ["rollout 12"]
    assert record.num_learned == (WANTED if "false" in word else 0)


def test_a_refill_whose_gradings_all_fail_does_not_end_the_run() -> None:
    source = _source()
    order = [f"{taken.prompt.prompt_id}@0" for taken in _source().take(2 * WANTED)]
    step, _ = _step(source, _grader(10**6, failing=order[WANTED] + "#"), "--learner.max_refills=1")
    assert step.run(1).groups
    step, _ = _step(_source(), _grader(2, failing="p/"))
    with pytest.raises(GradingError, match="all 12 completions failed to grade"):
        step.run(1)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 1000))
def test_a_refill_is_as_large_as_needed_and_never_larger_than_a_batch(wanted, few, more) -> None:
    size = refill_size(wanted=wanted, informative=few, sampled=max(few + more, 1))
    assert (size == 0) == (few >= wanted)
    assert size <= wanted
    if few < wanted:
        assert size >= wanted - few or size == wanted
