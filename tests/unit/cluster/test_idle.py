"""Idle workers train only where they are idle for longer than a stop takes."""

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


def test_a_drafter_that_knows_more_than_a_run_can_add_is_rarely_trained():
    """100 tokens in each of 40 rollouts, beside 255,000 known ones."""
    idle = IdleTraining()
    idle.num_known = 255_000
    assert trials(idle, 40, 6.0, 0.4, num_tokens=100) == [0, 1, 2, 3, 4, 20, 36]


def test_a_drafter_is_trained_while_a_run_can_add_much():
    """To 8,000 known tokens, 100 in each of 40 rollouts add more than an eighth until the 31st."""
    idle = IdleTraining()
    idle.num_known = 8_000
    assert trials(idle, 40, 6.0, 0.4, num_tokens=100) == list(range(32))
