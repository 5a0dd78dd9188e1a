"""Law 9: the tuner's regret shrinks; it recovers after a shift; plain decoding is never left out.

On a simulated engine (tests/support/simulated.py), where the truth is known: regret is what is lost
against an oracle that plays the best fixed chain, or none, for every number of running requests.
"""

from dataclasses import replace

import pytest

from longtail.speculation.strategy import Strategy
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.cost import DraftCost
from longtail.tuner.records import Batch
from longtail.tuner.tuner import FixedTuner, OffTuner
from support.simulated import (
    BAD,
    GOOD,
    MACHINE,
    Machine,
    Source,
    Truth,
    oracle_rate,
    rate_of,
    simulate,
)

HISTORY = DraftCost(start_s=1e-5, request_s=1e-5, level_s=0.0, row_s=1e-6)
BLOCK = DraftCost(start_s=2e-5, request_s=2e-6, level_s=1e-5, row_s=1e-6)
QUICK, SLOW = Machine(), Machine(token_s=4e-4)
"""SLOW: verification is dear, and drafting pays for few requests only."""


@pytest.mark.slow
@pytest.mark.parametrize("machine", [QUICK, SLOW], ids=["quick", "slow"])
@pytest.mark.parametrize("num", [1, 16, 64])
@pytest.mark.parametrize("truth", [GOOD, Truth(0.7, 0.3)], ids=["good", "mediocre"])
def test_the_budget_is_as_good_as_the_oracle_within_three_percent(truth, num, machine):
    """Better, where it may draft for each request as far as that one is worth it."""
    run = simulate(
        BudgetTuner(), steps=2400, truth=lambda _: truth, running=lambda _: num, machine=machine
    )
    assert run.rate(1800) > 0.97 * oracle_rate(truth, num, machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "machine"),
    [(1, QUICK), (4, QUICK), (32, QUICK), (4, SLOW)],
    ids=["1-quick", "4-quick", "32-quick", "4-slow"],
)
@pytest.mark.parametrize("block_first", [0.0, 0.3, 0.5])
def test_two_drafters_are_at_least_as_fast_as_the_better_one(num, machine, block_first):
    """They propose other tokens; what the worse one costs is less than two percent."""
    history = Source(5, first=0.3, next=0.8, cost=HISTORY)
    block = Source(6, first=block_first, next=0.6, cost=BLOCK)
    plain = num / machine.verify_s(num)
    alone = [rate_of([each], num, machine=machine) for each in (history, block)]
    together = rate_of([block, history], num, machine=machine)
    assert together > 0.98 * max(plain, *alone)
    if block_first == 0.3 and machine is QUICK and num <= 4:  # each is right where the other is not
        assert together > 1.03 * max(alone)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 16])
def test_a_shift_of_the_drafter_is_followed_both_ways(num):
    """Good, useless, good again: some time after each shift the best of the time is played."""
    steps, phase = 6000, 2000

    def truth(step: int) -> Truth:
        return BAD if phase <= step < 2 * phase else GOOD

    run = simulate(BudgetTuner(), steps=steps, truth=truth, running=lambda _: num)
    for begin, best in ((0, GOOD), (phase, BAD), (2 * phase, GOOD)):
        late = run.rate(begin + 2 * phase // 3, begin + phase)
        assert late > 0.97 * oracle_rate(best, num), f"after the shift at {begin}"


def test_a_drafter_that_was_changed_is_looked_at_at_once():
    """Useless for so long that looks are rare, then swapped for a good one."""
    tuner, swapped = BudgetTuner(), 3000

    def running(step: int) -> int:
        if step == swapped:
            tuner.reset_estimates()
        return 4

    run = simulate(
        tuner,
        steps=swapped + 300,
        truth=lambda step: BAD if step < swapped else GOOD,
        running=running,
    )
    assert run.rate(swapped + 100) > 0.97 * oracle_rate(GOOD, 4)


def test_a_batch_that_shrinks_is_followed_at_once():
    """64 running, where drafting loses on this machine, down to 1, where it wins."""

    def running(step: int) -> int:
        return max(1, 64 - step // 30)

    run = simulate(BudgetTuner(), steps=2400, truth=lambda _: GOOD, running=running, machine=SLOW)
    best = sum(run.tokens[step] / oracle_rate(GOOD, running(step), SLOW) for step in range(2400))
    assert sum(run.seconds) < 1.03 * best
    drafted = [plan.strategy is not None and not plan.is_probe for plan in run.plans]
    assert sum(drafted[:300]) < 60
    assert sum(drafted[-100:]) >= 98


def test_a_batch_that_halves_is_probed_at_once():
    """Useless for so long at 64 running that probes are rare, then good, with 4 running."""
    run = simulate(
        BudgetTuner(),
        steps=1800,
        truth=lambda step: BAD if step < 1500 else GOOD,
        running=lambda step: 64 if step < 1600 else 4,
    )
    assert run.rate(1650) > 0.95 * oracle_rate(GOOD, 4)


@pytest.mark.parametrize("num", [1, 8, 64])
def test_a_prompt_does_not_lower_the_price_of_time(num):
    """A step that reads 8 prompts of 100 tokens plans what the decoding after it plans."""
    decoding = Batch(num_draftable=num, num_sampled=num, num_tokens=num, num_pairs=num, room=500)
    reading = replace(decoding, num_tokens=num + 800, num_pairs=num + 800)
    plans = []
    for batch in (decoding, reading):
        tuner = BudgetTuner()
        tuner.begin(SLOW.costs(), 1)
        plans.append(tuner.plan(batch))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("num", "guarded"), [(1, False), (8, True), (64, False)])
def test_a_useless_drafter_costs_next_to_nothing(num, guarded):
    run = simulate(
        BudgetTuner(), steps=4000, truth=lambda _: BAD, running=lambda _: num, guarded=guarded
    )
    plain = simulate(OffTuner(), steps=10, truth=lambda _: BAD, running=lambda _: num).rate()
    assert run.rate() > 0.98 * plain
    looks = [step for step, plan in enumerate(run.plans) if plan.is_probe and plan.strategy]
    assert looks, "it goes on looking"
    assert len(looks) < 40


@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("running", [1, 48])
def test_a_useless_drafter_loses_one_percent_with_any_strategy(depth, running):
    """Beside the grant, and the step in which the account runs out."""
    chain = FixedTuner(Strategy(depth=depth))
    run = simulate(chain, steps=6000, truth=lambda _: BAD, running=lambda _: running, guarded=True)
    plain_s = [MACHINE.verify_s(running) * tokens / running for tokens in run.tokens]
    lost_s = sum(run.seconds) - sum(plain_s)
    assert lost_s < 0.011 * sum(run.seconds) + 24 * MACHINE.verify_s(running)
    drafted = [plan.strategy is not None for plan in run.plans]
    assert any(drafted[3000:])  # it may always try again
    assert "paused" in run.reasons[0]
