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
MEAN, DEVIATION = 4 / 3, statistics.stdev([2.0, 2.0, 0.0])


def group(*rewards: float, length: int = 1) -> Group:
    rollouts = tuple(rollout((1,) * (1 + length), 1, reward=reward) for reward in rewards)
    return Group(prompt=Prompt(prompt_id="p0", tokens=(1,), text=""), rollouts=rollouts)


@pytest.mark.parametrize(
    ("estimator", "rewards", "expected"),
    [
        # mean 0.25, deviations .75 -.25 -.25 -.25, sum of squares .75, variance .75/3, std .5
        (advantage.grpo, [[1.0, 0.0, 0.0, 0.0]], [[1.5, -0.5, -0.5, -0.5]]),
        (advantage.dr_grpo, [[1.0, 0.0], [3.0, 0.0, 0.0]], [[0.5, -0.5], [2.0, -1.0, -1.0]]),
        (advantage.rloo, [[4.0, 1.0, 1.0]], [[4 - (1 + 1) / 2, 1 - (4 + 1) / 2, 1 - (4 + 1) / 2]]),
        # over the batch, not the group
        (
            advantage.reinforce_pp,
            [[2.0, 2.0], [0.0]],
            [[(2 - MEAN) / DEVIATION] * 2, [-MEAN / DEVIATION]],
        ),
        (advantage.grpo, [[5.0], []], [[0.0], []]),
        (advantage.dr_grpo, [[5.0], []], [[0.0], []]),
        (advantage.rloo, [[5.0], []], [[0.0], []]),
    ],
)
def test_advantages_are_the_sums_of_the_papers(estimator, rewards, expected):
    for found, values in zip(estimator(rewards), expected, strict=True):
        assert found == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    # 0.1 three times: the rounded mean is not 0.1, and a division by eps would blow that up.
    assert estimator([[0.1, 0.1, 0.1]]) == [[0.0, 0.0, 0.0]]


@given(rewards=REWARDS)
def test_advantages_keep_the_shape_and_sum_to_zero(rewards):
    for estimator in ESTIMATORS:
        values = estimator(rewards)
        assert [len(v) for v in values] == [len(r) for r in rewards]
        flat = [v for one in values for v in one]
        assert all(math.isfinite(v) for v in flat)
        assert math.fsum(flat) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "buffer", "penalty"),
    [(0, 20, 0), (80, 20, 0), (81, 20, -0.05), (100, 20, -1), (130, 20, -1), (100, 0, 0)],
)
def test_the_overlong_penalty_is_linear_inside_the_buffer(length, buffer, penalty):
    found = advantage.overlong_penalty(length, max_tokens=100, buffer=buffer)
    assert found == pytest.approx(penalty)


def test_shaped_rewards_add_the_penalty_of_each_completion():
    long, short = group(1.0, 0.0, length=15), group(1.0, length=5)
    shaped = advantage.shaped_rewards([long, short], max_tokens=20, buffer=10)
    assert shaped == [[0.5, -0.5], [1.0]]
