"""Mixtures of reasoning-gym tasks."""

import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.errors import ConfigError, DataError
from longtail.rl.data.mixture import LEVEL, TASK, Mixture, Task, mixture, schedule
from longtail.rl.grading.reward import GradingTask, resolve_reward

reasoning_gym = pytest.importorskip("reasoning_gym")
SUM = Task(name="chain_sum", weight=2.0, config={"max_terms": 3, "max_digits": 2})
SPELL = Task(name="spell_backward")


def _mixture(*tasks: Task, size: int = 30, heldout_size: int = 6, seed: int = 0) -> Mixture:
    return mixture(tasks, size=size, heldout_size=heldout_size, seed=seed)


weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(weights, st.integers(0, 300))
def test_at_every_position_a_task_is_within_one_prompt_of_its_share(weights, size):
    order = schedule(weights, size)
    assert order == schedule(weights, size)
    for position in range(size + 1):
        counts = Counter(order[:position])
        for index, weight in enumerate(weights):
            # The task that lacks most problems is next, so no task ever has one too many.
            assert counts[index] - position * weight / sum(weights) < 1
    counts = Counter(order)
    for index, weight in enumerate(weights):
        assert abs(counts[index] - size * weight / sum(weights)) < len(weights)


def test_the_tasks_come_in_proportion_to_their_weights():
    rows = _mixture(SUM, SPELL)
    assert Counter(row[TASK] for row in rows.train) == {"chain_sum": 20, "spell_backward": 10}
    assert Counter(row[TASK] for row in rows.heldout) == {"chain_sum": 4, "spell_backward": 2}
    assert [row["id"] for row in rows.train[:3]] == [
        "chain_sum/0",
        "spell_backward/0",
        "chain_sum/1",
    ]


def test_a_mixture_is_a_function_of_its_seed():
    assert _mixture(SUM, SPELL, seed=3) == _mixture(SUM, SPELL, seed=3)
    assert _mixture(SUM, SPELL, seed=3) != _mixture(SUM, SPELL, seed=4)


def test_a_problem_does_not_depend_on_the_weights_nor_the_other_tasks():
    alone, both = _mixture(SUM, heldout_size=0), _mixture(SPELL, SUM, heldout_size=0)
    texts = {row["id"]: row["prompt"] for row in alone.train}
    shared = {row["id"]: row["prompt"] for row in both.train if row[TASK] == "chain_sum"}
    assert shared
    assert shared.items() <= texts.items()


def test_parameters_reach_the_generator():
    for row in _mixture(SUM).train:
        assert row["reasoning_gym_entry"]["metadata"]["difficulty"] == {
            "num_terms": (2, 3),
            "num_digits": (1, 2),
        }


def test_held_out_prompts_are_not_trained_on():
    few = Task(name="chain_sum", config={"max_terms": 2, "max_digits": 1})  # 200 problems
    rows = _mixture(few, size=400, heldout_size=80)
    held = {row["prompt"] for row in rows.heldout}
    assert held.isdisjoint(row["prompt"] for row in rows.train)
    assert len(rows.train) == 400


def test_a_task_with_too_few_problems_is_refused():
    few = Task(name="coin_flip", config={"min_trials": 3, "max_trials": 3})
    with pytest.raises((DataError, ConfigError), match=r"data\.tasks\[0\]"):
        _mixture(few, size=10, heldout_size=3000)


def test_levels_are_those_of_the_tasks_own_curriculum():
    rows = _mixture(Task(name="chain_sum", levels=(0, 3)), size=5, heldout_size=4)
    assert [row[LEVEL] for row in rows.train] == [0, 3] * 5
    assert [row[LEVEL] for row in rows.heldout] == [0, 3, 0, 3]
    assert rows.train[1]["reasoning_gym_config"] == {
        "min_terms": 2,
        "max_terms": 5,
        "min_digits": 1,
        "max_digits": 4,
    }
    assert rows.train[1]["id"] == "chain_sum/level3/0"


def test_a_completion_is_scored_by_its_own_task_with_its_parameters():
    places = {"max_num_decimal_places": 5, "min_num_decimal_places": 5}
    tasks = (SUM, Task(name="decimal_arithmetic", config=places))
    reward = resolve_reward("reasoning_gym")
    for row in _mixture(*tasks).train:
        right = GradingTask(prompt=row["prompt"], text=str(row["answer"]), tokens=(), data=row)
        assert reward.grade(right) == 1.0
        wrong = GradingTask(prompt=row["prompt"], text="no", tokens=(), data=row)
        assert reward.grade(wrong) < 0.1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (Task(name="chain_sm"), r"name = 'chain_sm': .*no such task; did you mean 'chain_sum'"),
        (Task(name="zzzz"), r"name = 'zzzz': .*no such task; ab, acre, .*, zebra_puzzles"),
        (Task(name="composite"), "no such task"),
        (
            Task(name="gcd", config={"min_number": 1}),
            r"config\.min_number: 'gcd' has no such parameter; .*min_numbers.*it has .*max_value",
        ),
        (
            Task(name="gcd", config={"min_numbers": "2"}),
            r"config\.min_numbers = '2': it must be of type int",
        ),
        (
            Task(name="gcd", config={"min_numbers": True}),
            r"config\.min_numbers = True: it must be of type int",
        ),
        (Task(name="gcd", config={"seed": 2}), r"config\.seed: it follows run\.seed"),
        (Task(name="gcd", config={"min_numbers": 9}), "'gcd' refuses its config: .*max_numbers"),
        (Task(name="gcd", levels=(9,)), "the curriculum of 'gcd' has levels 0 to 3, not 9"),
        (Task(name="acre", levels=(0,)), "'acre' has no curriculum"),
        (
            Task(name="chain_sum", config={"max_terms": 3}, levels=(0,)),
            r"config\.max_terms: the level of 'chain_sum' sets it",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_problem_is_made(task, message):
    with pytest.raises(ConfigError, match=rf"^data\.tasks\[1\].*{message}"):
        _mixture(SPELL, task)


def test_a_weight_that_gives_no_prompt_is_refused():
    with pytest.raises(ConfigError, match=r"data\.tasks\[1\]\.weight = 0\.001: none of 30"):
        _mixture(SUM, Task(name="gcd", weight=0.001))


class _Broken:
    """reasoning_gym, whose problems cannot be made."""

    factory = reasoning_gym.factory

    def create_dataset(self, name, **settings):
        raise ValueError("too hard")


def test_a_problem_that_cannot_be_made_is_refused_with_its_level(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", _Broken())
    with pytest.raises(DataError, match="cannot make problem 0 of level 1 of 'spell_backward'"):
        _mixture(Task(name="spell_backward", levels=(1,)), heldout_size=0)
