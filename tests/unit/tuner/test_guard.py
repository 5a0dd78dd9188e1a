"""The guard: what drafting may lose, when it is paused and when it resumes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.guard import LOSS_SHARE, Guard
from longtail.tuner.messages import Batch, DraftTiming, Outcome, Plan

PLAIN_S = 1e-3
"""Seconds of a plain step of any size, in a cost model without corrections."""
INITIAL, RESUME, MOST, STALL = 3, 2, 8, 4


BATCH = Batch(num_draftable=4, num_sampled=4, num_tokens=4, num_pairs=4, room=60)


def make_guard() -> Guard:
    costs = CostModel(TimeCurve((1, 64), (PLAIN_S, PLAIN_S)), pair_s=0.0, node_pair_s=0.0)
    costs.drafts = [DraftCost(start_s=0.0, request_s=0.0, level_s=0.0, row_s=1e-9)]
    return Guard(costs)


def step(took: float, *, accepted: int = 0, drafted: bool = True) -> Outcome:
    """A step of four requests that took the time of `took` plain steps."""
    timing = DraftTiming(drafter=0, num_requests=4, levels=2, rows=8, seconds=0.1 * took * PLAIN_S)
    return Outcome(
        batch=BATCH,
        plan=Plan(strategy=Strategy(depth=2) if drafted else None),
        timings=(timing,) if drafted else (),
        num_drafts=4 if drafted else 0,
        num_nodes=8 if drafted else 0,
        num_accepted=accepted,
        verify_s=(0.9 if drafted else 1.0) * took * PLAIN_S,
    )


LOSING, WINNING, PLAIN = step(1.5, accepted=1), step(1.5, accepted=4), step(1.0, drafted=False)
"""1.25 plain steps' tokens in the time of 1.5; 2.0 in that of 1.5."""


def lose(guard: Guard, outcome: Outcome = LOSING) -> int:
    """Lose until paused; return the number of steps."""
    count = 1
    while not guard.learn(outcome):
        if not guard.allows(BATCH):  # plain decoding is measured
            guard.learn(PLAIN)
        assert guard.allows(BATCH)
        count += 1
    return count


def pause_length(guard: Guard) -> int:
    """Count the plain steps until drafting is allowed again."""
    count = 0
    while not guard.allows(BATCH):
        assert not guard.learn(PLAIN)
        count += 1
    return count


def test_drafting_that_loses_is_paused_with_a_reason():
    guard = make_guard()
    steps = lose(guard)
    assert steps == pytest.approx(INITIAL / (0.25 - 1.5 * LOSS_SHARE), abs=1)
    guard = make_guard()
    reasons = [guard.learn(LOSING) for _ in range(steps)]
    assert reasons[-1] == (
        "drafting gave 0.83x of plain decoding lately, at 4 running: paused until the loss is "
        "below 1% of the time"
    )


def test_slow_steps_of_a_busy_machine_do_not_pause_drafting_that_gains():
    guard, slow = make_guard(), step(0.95 * STALL, accepted=1)
    for outcome in 4 * [*32 * [step(1.0, accepted=4)], *4 * [slow]]:
        assert not guard.learn(outcome)
        if not guard.allows(BATCH):  # plain decoding is measured
            guard.learn(PLAIN)
    assert lose(guard, slow) < 4 * MOST


def test_a_pause_ends_when_one_percent_of_it_pays_for_another_trial():
    guard = make_guard()
    lose(guard)
    assert RESUME / LOSS_SHARE <= pause_length(guard) + 1 <= (RESUME + 1) / LOSS_SHARE
    assert lose(guard) == pytest.approx(RESUME / (0.25 - 1.5 * LOSS_SHARE), abs=1)


@pytest.mark.parametrize(("longest", "more"), [(0.0, 0.0), (6.0, MOST + 6.0)])
@given(data=st.data())
def test_no_steps_lose_more_than_an_account_and_the_share_and_reading_no_more_than_another(
    longest, more, data
):
    """Reading after pauses takes up to `longest` plain steps and may lose `more` of them."""
    numbers = (st.floats(0.5, 0.99 * STALL), st.integers(0, 8), st.floats(0.0, longest))
    guard, lost, total = make_guard(), 0.0, 0.0
    for took, accepted, read, num_plain in data.draw(
        st.lists(st.tuples(*numbers, st.integers(0, 40)), max_size=200)
    ):
        if guard.allows(BATCH):
            guard.learn(replace(step(took, accepted=accepted), catch_up_s=read * PLAIN_S))
            lost += took + read - (1 + accepted / 4)
            total += took
        for _ in range(num_plain):
            guard.learn(PLAIN)
            total += 1
        assert lost <= INITIAL + STALL + more + LOSS_SHARE * total + 1e-6


@given(pauses=st.integers(1, MOST))
def test_reading_what_was_written_in_a_pause_ends_no_trial_and_is_paid_before_the_next(pauses):
    guard = make_guard()
    lose(guard)
    plain = pause_length(guard)
    read = replace(LOSING, catch_up_s=pauses * PLAIN_S)
    assert not guard.learn(read), "the trial goes on"
    lose(guard)
    longer = pause_length(guard)
    assert longer == pytest.approx(plain + pauses / LOSS_SHARE, abs=1 / LOSS_SHARE)


def test_drafting_that_loses_less_than_one_percent_goes_on_forever():
    guard = make_guard()
    assert not any(guard.learn(step(1.009)) for _ in range(2000))
    assert any(guard.learn(step(1.03)) for _ in range(1000))


def test_a_stall_of_the_machine_is_not_the_drafters_loss():
    guard = make_guard()
    assert not any(guard.learn(step(1000.0, accepted=1)) for _ in range(100))
    assert lose(guard, step(0.99 * STALL)) <= MOST


def test_a_loss_in_a_full_batch_does_not_pause_drafting_in_its_tail():
    guard = make_guard()
    lose(guard)
    assert not guard.allows(BATCH)
    assert not guard.allows(replace(BATCH, num_sampled=7))
    assert guard.allows(replace(BATCH, num_sampled=8))
    assert guard.allows(replace(BATCH, num_sampled=3))
