"""Curricula: levels that rise with rewards, in the cursor of a prompt source."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.errors import DataError
from longtail.rl.data.curriculum import Curriculum, LevelRule
from longtail.rl.data.mixture import LEVEL, TASK
from longtail.rl.data.prompts import PromptSet, PromptSource
from longtail.types import Completion, FinishReason, Group, Prompt, Rollout

RULE = LevelRule(levels=(0, 1, 2), raise_at=0.5, groups=2)


def _prompt(task: str, level: int | None, number: int) -> Prompt:
    name = f"{task}/{level}/{number}"
    return Prompt(prompt_id=name, tokens=(1,), text=name, data={TASK: task, LEVEL: level})


PROMPTS = tuple(
    _prompt(task, level, number)
    for task, levels in (("sums", (0, 1, 2)), ("words", (None,)))
    for level in levels
    for number in range(4)
)


def _group(prompt: Prompt, *rewards: float) -> Group:
    completion = Completion(
        request_id="r",
        tokens=(1,),
        logprobs=(0.0,),
        text="",
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    rollouts = [Rollout(prompt=prompt, completion=completion, reward=each) for each in rewards]
    return Group(prompt=prompt, rollouts=tuple(rollouts))


def _curriculum() -> Curriculum:
    return Curriculum({"sums": RULE})


def _source(seed: int = 0) -> PromptSource:
    prompts = PromptSet(source="s", prompts=PROMPTS, rows=tuple(range(len(PROMPTS))))
    return PromptSource(prompts, seed=seed, curriculum=_curriculum())


def _at(level: int, *rewards: float) -> list[Group]:
    return [_group(_prompt("sums", level, 0), reward) for reward in rewards]


def test_a_level_rises_when_the_last_groups_reach_the_mean_reward() -> None:
    curriculum = _curriculum()
    assert curriculum.record(_at(0, 0.2)) == []
    assert curriculum.record(_at(0, 0.4)) == []
    (line,) = curriculum.record(_at(0, 0.6))
    assert line == "sums: level 1 from the next step on (mean reward 0.500 over 2 groups)"
    assert curriculum.record(_at(1, 0.9)) == []  # earlier groups no longer count
    assert curriculum.record(_at(0, 1.0)) == []  # nor do those of another level
    assert curriculum.record(_at(1, 0.0)) == []
    assert curriculum.record(_at(1, 1.0, 1.0, 1.0)) != []
    assert curriculum.record(_at(2, 1.0, 1.0, 1.0)) == []  # the highest
    assert curriculum.levels == {"sums": 2}


def test_a_group_counts_as_its_mean_and_other_tasks_do_not() -> None:
    curriculum = _curriculum()
    half, word = _group(_prompt("sums", 0, 0), 0.0, 1.0), _group(_prompt("words", None, 0), 1.0)
    assert curriculum.record([word, word, half]) == []
    assert curriculum.record([half]) != []


def test_a_source_visits_the_prompts_of_the_present_level_once_in_an_epoch() -> None:
    source = _source()
    first = source.take(8)
    assert {each.prompt.prompt_id for each in first} == {
        prompt.prompt_id for prompt in PROMPTS if prompt.data[LEVEL] in (0, None)
    }
    source.observe(_at(0, 1.0, 1.0))
    levels = {each.prompt.data[LEVEL] for each in source.take(8)}
    assert levels == {1, None}


rewards = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), max_size=3), max_size=12)


@settings(max_examples=40, deadline=None)
@given(rewards, st.integers(0, 12), st.integers(0, 3))
def test_a_resumed_source_goes_on_like_an_uninterrupted_one(steps, cut, seed) -> None:
    def run(source, steps):
        seen = []
        for rewards in steps:
            taken = source.take(3)
            seen.append([(each.prompt.prompt_id, each.epoch) for each in taken])
            sums = [each.prompt for each in taken if each.prompt.data[TASK] == "sums"]
            pairs = zip(sums, rewards, strict=False)
            source.observe([_group(prompt, reward) for prompt, reward in pairs])
        return seen

    whole = run(_source(seed), steps)
    before = _source(seed)
    head = run(before, steps[:cut])
    after = _source(seed)
    after.restore(json.loads(json.dumps(before.state())))
    assert head + run(after, steps[cut:]) == whole


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"sums": {"level": 7, "recent": []}},
        {"sums": {"level": 0}},
        {"sums": {"level": 0, "recent": ["x"]}},
    ],
)
def test_a_damaged_state_is_refused(state) -> None:
    with pytest.raises(DataError, match="curriculum is damaged"):
        _source().restore({**_source().state(), "curriculum": state})


def test_a_level_without_a_prompt_is_refused() -> None:
    prompts = tuple(itertools.takewhile(lambda prompt: prompt.data[LEVEL] != 2, PROMPTS))
    with pytest.raises(DataError, match="level 2 of 'sums' has no prompt left"):
        PromptSource(
            PromptSet(source="s", prompts=prompts, rows=tuple(range(len(prompts)))),
            seed=0,
            curriculum=_curriculum(),
        )
