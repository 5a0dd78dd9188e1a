"""The bandit: groups by load, arms by their median reward, and a seed that decides the rest."""

from longtail.speculation.strategy import Strategy
from longtail.tuner.bandit import BanditTuner, Bucket
from longtail.tuner.records import Batch, Outcome, Plan

SHALLOW, DEEP = Strategy(depth=2, size=2), Strategy(depth=8, size=8)
ARMS = (0, 8, 2)
"""Depths in the order of a group's arms; 0 decodes plainly."""
TWO = (
    Bucket(max_requests=4, strategies=(DEEP, SHALLOW)),
    Bucket(max_requests=16, strategies=(SHALLOW,)),
)


def batch(num: int = 1, *, prompt: int = 0, room: int = 400) -> Batch:
    return Batch(
        num_draftable=num, num_sampled=num, num_tokens=num + prompt, num_pairs=num, room=room
    )


def greedy(buckets: tuple[Bucket, ...] = TWO, window: int = 300) -> BanditTuner:
    return BanditTuner(buckets=buckets, epsilon=0.0, window=window)


def depth_of(plan: Plan) -> int:
    return 0 if plan.strategy is None else plan.strategy.depth


def told(plan: Plan, batch: Batch, rate: float) -> Outcome:
    """A step without accepted drafts with the given tokens per second."""
    return Outcome(
        batch=batch,
        plan=plan,
        timings=(),
        num_drafts=0,
        num_nodes=0,
        num_accepted=0,
        verify_s=batch.num_sampled / rate,
    )


def play(tuner: BanditTuner, rates: dict[int, float], num: int = 1) -> int:
    """One step in which an arm is as quick as its depth says; return that depth."""
    plan = tuner.plan(batch(num))
    tuner.learn(told(plan, batch(num), rates[depth_of(plan)]))
    return depth_of(plan)


def test_all_arms_are_tried_before_the_best_is_played():
    tuner = greedy()
    rates = {0: 10.0, 8: 30.0, 2: 20.0}
    assert [play(tuner, rates) for _ in range(6)] == [*ARMS, 8, 8, 8]


def test_groups_learn_apart_and_the_last_takes_the_rest():
    tuner = greedy()
    for _ in range(5):
        play(tuner, {0: 10.0, 8: 30.0, 2: 20.0}, num=4)
    assert [play(tuner, {0: 30.0, 2: 20.0}, num=5) for _ in range(3)] == [0, 2, 0]
    assert play(tuner, {0: 30.0}, num=1000) == 0
    assert play(tuner, {8: 30.0}, num=1) == 8


def test_rewards_outside_the_window_are_forgotten():
    tuner = greedy(window=3)
    rates = {0: 10.0, 8: 30.0, 2: 20.0}
    for _ in range(20):
        play(tuner, rates)
    slower = rates | {8: 15.0}
    assert [play(tuner, slower) for _ in range(4)] == [8, 8, 2, 2]


def test_steps_that_read_prompts_are_no_reward():
    tuner = greedy()
    reading = batch(1, prompt=50)
    for _ in range(3):
        plan = tuner.plan(reading)
        assert depth_of(plan) == 0  # still the first untried arm
        tuner.learn(told(plan, reading, 1.0))


def test_plans_fit_the_room_and_ask_every_drafter():
    tuner = greedy((Bucket(max_requests=4, strategies=(DEEP,)),))
    tuner.begin(None, 2)
    tuner.learn(told(tuner.plan(batch()), batch(), 1.0))
    plan = tuner.plan(batch(2, room=20))
    assert plan.strategy == Strategy(depth=5, size=5)
    assert plan.drafters == (0, 1)
    assert tuner.plan(batch(2, room=3)).strategy is None


def test_the_same_seed_and_outcomes_give_the_same_arms():
    rates = {0: 10.0, 8: 30.0, 2: 20.0}

    def run(seed: int) -> list[int]:
        tuner = BanditTuner(buckets=TWO, epsilon=0.5, seed=seed)
        arms = [play(tuner, rates) for _ in range(60)]
        tuner.begin(None, 1)
        assert [play(tuner, rates) for _ in range(60)] == arms  # it starts over entirely
        return arms

    assert run(1) == run(1) != run(2)
    assert set(run(1)[10:]) == set(ARMS)  # and explores to the end
