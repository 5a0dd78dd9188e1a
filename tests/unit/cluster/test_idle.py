"""Idle workers train only where they are idle for longer than a stop takes."""

from longtail.cluster.drafter.idle import IdleTraining


def trials(idle: IdleTraining, num_rollouts: int, trained_s: float, waited_s: float) -> list[int]:
    """Return the rollouts, from 0, in which idle workers trained."""
    found = []
    for number in range(num_rollouts):
        if idle.wants():
            found.append(number)
            idle.record(trained_s, waited_s, rollout_s=4.0)
    return found


def test_brief_idle_times_are_tried_ever_more_rarely():
    assert trials(IdleTraining(), 60, trained_s=0.4, waited_s=0.4) == [0, 2, 5, 10, 19, 36, 53]


def test_long_idle_times_are_always_used():
    assert trials(IdleTraining(), 5, trained_s=6.0, waited_s=0.4) == [0, 1, 2, 3, 4]


def test_a_tail_that_grows_is_found_and_used_from_then_on():
    idle = IdleTraining()
    trials(idle, 37, trained_s=0.4, waited_s=0.4)
    assert trials(idle, 20, trained_s=6.0, waited_s=0.4) == [16, 17, 18, 19]


def test_a_rollout_in_which_no_worker_was_idle_says_nothing():
    assert trials(IdleTraining(), 5, trained_s=0.0, waited_s=0.0) == [0, 1, 2, 3, 4]


def test_a_stop_that_takes_a_hundredth_of_the_rollout_is_free():
    assert trials(IdleTraining(), 4, trained_s=0.01, waited_s=0.04) == [0, 1, 2, 3]
