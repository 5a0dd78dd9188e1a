"""Advantages against sums done by hand."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.rl import advantage
from longtail.types import Group, Prompt
from support.rollouts import rollout

ESTIMATORS = (advantage.grpo, advantage.dr_grpo, advantage.rloo, advantage.reinforce_pp)
REWARDS = st.lists(st.lists(st.floats(-10, 10, allow_subnormal=False), max_size=6), max_size=5)


def group(*rewards: float, length: int = 1) -> Group:
    rollouts = tuple(rollout((1,) * (1 + length), 1, reward=reward) for reward in rewards)
    return Group(prompt=Prompt(prompt_id="p0", tokens=(1,), text=""), rollouts=rollouts)


def test_grpo_divides_by_the_deviation_of_the_group():
    # mean 0.25, deviations .75 -.25 -.25 -.25, sum of squares .75, variance .75/3, std .5
    (values,) = advantage.grpo([[1.0, 0.0, 0.0, 0.0]])
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    assert advantage.dr_grpo([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0]]) == [
        [0.75, -0.25, -0.25, -0.25],
        [1.0, -1.0],
    ]


def test_rloo_compares_each_completion_with_the_others_only():
    rewards = [4.0, 1.0, 1.0]
    (values,) = advantage.rloo([rewards])
    others = [(1.0 + 1.0) / 2, (4.0 + 1.0) / 2, (4.0 + 1.0) / 2]
    assert values == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


def test_reinforce_pp_normalises_over_the_batch_and_not_the_group():
    values = advantage.reinforce_pp([[2.0, 2.0], [0.0]])
    mean, deviation = 4 / 3, statistics.stdev([2.0, 2.0, 0.0])
    assert values[0] == pytest.approx([(2 - mean) / deviation] * 2, rel=1e-5)
    assert values[1] == pytest.approx([(0 - mean) / deviation], rel=1e-5)


@pytest.mark.parametrize("estimator", [advantage.grpo, advantage.dr_grpo, advantage.rloo])
def test_a_group_of_one_gets_no_advantage(estimator):
    assert estimator([[5.0], [1.0, 0.0], []])[0] == [0.0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    # 0.1 three times: the rounded mean is not 0.1, and a division by eps would blow that up.
    assert estimator([[0.1, 0.1, 0.1]]) == [[0.0, 0.0, 0.0]]


@pytest.mark.slow
@given(rewards=REWARDS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_keep_the_shape_and_sum_to_zero(estimator, rewards):
    values = estimator(rewards)
    assert [len(v) for v in values] == [len(r) for r in rewards]
    flat = [v for one in values for v in one]
    assert all(math.isfinite(v) for v in flat)
    assert math.fsum(flat) == pytest.approx(0.0, abs=1e-6)


def test_dynamic_sampling_drops_groups_that_teach_nothing():
    mixed, solved, single = group(1.0, 0.0), group(1.0, 1.0), group(1.0)
    assert advantage.keep_informative([solved, mixed, single, group()]) == [mixed]


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (130, -1.0)]
)
def test_the_overlong_penalty_is_linear_inside_the_buffer(length, penalty):
    found = advantage.overlong_penalty(length, max_tokens=100, buffer=20)
    assert found == pytest.approx(penalty)


def test_a_buffer_of_zero_switches_the_penalty_off():
    assert advantage.overlong_penalty(100, max_tokens=100, buffer=0) == 0.0


def test_shaped_rewards_add_the_penalty_of_each_completion():
    long, short = group(1.0, 0.0, length=15), group(1.0, length=5)
    shaped = advantage.shaped_rewards([long, short], max_tokens=20, buffer=10)
    assert shaped == [[0.5, -0.5], [1.0]]
