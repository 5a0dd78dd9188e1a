"""Idle workers train only where they are idle for longer than a stop takes."""

import pytest

from longtail.cluster.drafter.idle import IdleTraining


def trials(
    idle: IdleTraining, num_rollouts: int, trained_s: float, waited_s: float, num_tokens: int = 0
) -> list[int]:
    """Return the rollouts, from 0, in which idle workers trained."""
    found = []
    for number in range(num_rollouts):
        if idle.wants(num_rollouts - number):
            found.append(number)
            idle.record(trained_s, waited_s, rollout_s=4.0, num_tokens=num_tokens)
    return found


@pytest.mark.parametrize(
    ("num_rollouts", "trained_s", "waited_s", "expected"),
    [
        (60, 0.4, 0.4, [0, 2, 5, 10, 19, 36, 53]),
        (5, 6.0, 0.4, [0, 1, 2, 3, 4]),
        (5, 0.0, 0.0, [0, 1, 2, 3, 4]),
        (4, 0.01, 0.04, [0, 1, 2, 3]),
    ],
    ids=["brief", "long", "never-idle", "stop-is-a-hundredth"],
)
def test_brief_idle_times_are_tried_ever_more_rarely_and_others_always_used(
    num_rollouts, trained_s, waited_s, expected
):
    assert trials(IdleTraining(), num_rollouts, trained_s, waited_s) == expected


def test_a_tail_that_grows_is_found_and_used_from_then_on():
    idle = IdleTraining()
    trials(idle, 37, trained_s=0.4, waited_s=0.4)
    assert trials(idle, 20, trained_s=6.0, waited_s=0.4) == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("num_known", "expected"), [(255_000, [0, 1, 2, 3, 4, 20, 36]), (8_000, list(range(32)))]
)
def test_a_drafter_is_trained_often_while_a_run_can_add_much(num_known, expected):
    """100 tokens in each of 40 rollouts: beside 8,000, more than an eighth until the 31st."""
    idle = IdleTraining()
    idle.num_known = num_known
    assert trials(idle, 40, 6.0, 0.4, num_tokens=100) == expected
