"""Groups that are graded and packed as they are finished, in any order."""

import random
import time
from typing import Any

import pytest

from longtail.config.rl import LearnerSection, load
from longtail.errors import GradingError
from longtail.rl.data.prompts import Taken
from longtail.rl.data.requests import RequestBatch, requests_of
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.rl.group_stream import GroupStream, streams, why_not
from longtail.types import Completion, Prompt, SamplingParams
from support.rollouts import completion, graders

PROMPTS, SAMPLES = 5, 3


def config(*words: str) -> LearnerSection:
    sizes = [f"--rollout.prompts_per_step={PROMPTS}", f"--rollout.group_size={SAMPLES}"]
    return load(None, ["--learner.loss=grpo", *sizes, *words]).learner


def asked() -> RequestBatch:
    prompts = [Prompt(prompt_id=f"p/{n}", tokens=(1, n), text="") for n in range(PROMPTS)]
    taken = [Taken(prompt=prompt, epoch=0) for prompt in prompts]
    return requests_of(taken, samples=SAMPLES, seed=0, sampling=SamplingParams())


def grader(graded: list[str]) -> GraderPool:
    """Return a pool whose rewards are sample numbers, or equal in group 1; a text of 2 fails."""

    def reward(name: str) -> float | None:
        graded.append(name)
        return 1.0 if name.startswith("p/1@") else None if name == "p/2@0#1" else float(name[-1])

    return graders(reward)


def texts(batch: RequestBatch) -> list[Completion]:
    return [completion(each.request_id, (3, 4, 5)) for each in batch.requests]


def groups_of(micro_batches: Any) -> list[str]:
    return [each.name.rpartition("/")[0] for each in micro_batches]


def wait_for(stream: GroupStream, count: int) -> list[str]:
    found = list[str]()
    end = time.monotonic() + 20.0
    while len(found) < count and time.monotonic() < end:
        found += groups_of(stream.micro_batches())
        time.sleep(0.001)
    return found


def test_a_group_is_packed_as_soon_as_its_last_text_is_finished():
    batch, names = asked(), list[str]()
    stream = GroupStream(batch, grader(names), config(), num_wanted=PROMPTS)
    done = texts(batch)
    stream.add(done[1:SAMPLES])
    stream.add(done[SAMPLES : 2 * SAMPLES - 1])
    assert not names
    assert stream.micro_batches() == []
    stream.add(done[:1])
    assert wait_for(stream, 1) == ["p/0@0"]
    assert len(names) == SAMPLES
    stream.add(done)
    stream.finish()


@pytest.mark.parametrize("seed", range(2))
def test_grades_are_in_the_order_of_requests_and_packed_groups_can_be_learned_from(seed):
    batch, names = asked(), list[str]()
    stream = GroupStream(batch, grader(names), config(), num_wanted=PROMPTS)
    done = texts(batch)
    random.Random(seed).shuffle(done)
    for each in done:
        stream.add([each, each])
    graded = stream.finish()
    expected = [each.request_id for each in batch.requests if each.request_id != "p/2@0#1"]
    assert [each.completion.request_id for each in graded.rollouts] == expected
    assert [each.completion.request_id for each in graded.failures] == ["p/2@0#1"]
    assert len(names) == PROMPTS * SAMPLES
    # Group 1 has equal rewards, so it has no gradient.
    packed = groups_of(stream.micro_batches())
    assert sorted(packed) == ["p/0@0", "p/2@0", "p/3@0", "p/4@0"]


def test_with_dynamic_sampling_only_groups_that_are_surely_kept_are_packed():
    batch = asked()
    dynamic = config("--learner.dynamic_sampling=true")
    stream = GroupStream(batch, grader([]), dynamic, num_wanted=3)
    stream.add(texts(batch))
    stream.finish()
    assert sorted(groups_of(stream.micro_batches())) == ["p/0@0", "p/2@0"]


def test_what_grading_raises_is_raised_at_the_end():
    def broken(pairs: Any) -> Graded:
        raise GradingError("the graders ended")

    pool: Any = object.__new__(GraderPool)
    pool.grade = broken
    batch = asked()
    stream = GroupStream(batch, pool, config(), num_wanted=PROMPTS)
    stream.add(texts(batch))
    with pytest.raises(GradingError, match="the graders ended"):
        stream.finish()


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--learner.mini_batches=2", "learner.mini_batches = 2"),
        ("--learner.sharding=full", "learner.sharding = 'full'"),
        ("--learner.loss=reinforce_pp", "learner.loss = 'reinforce_pp'"),
    ],
)
def test_what_needs_the_whole_step_is_named_and_not_packed_before(word, reason):
    own = config(word)
    assert reason in str(why_not(own))
    assert not streams(own)
    batch = asked()
    stream = GroupStream(batch, grader([]), own, num_wanted=PROMPTS)
    stream.add(texts(batch))
    stream.finish()
    assert stream.micro_batches() == []
    assert not streams(config("--learner.streaming=false"))
    assert streams(config())
