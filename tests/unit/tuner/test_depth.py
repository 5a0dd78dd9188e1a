"""The depth of chains on a simulated engine, where the best depth is known (law 9)."""

import random

import pytest

from longtail.tuner.depth import DepthTuner
from longtail.tuner.messages import Batch, Outcome

DEEPEST = 8


def batch(running: int) -> Batch:
    return Batch(
        num_draftable=running,
        num_sampled=running,
        num_tokens=running,
        num_pairs=0,
        room=DEEPEST * running,
    )


def seconds(running: int, depth: int, slope: float) -> float:
    return (0.02 + 0.002 * running) * (1 + depth * slope)


class Simulated:
    """Steps whose drafts stand by a chance each; the tuner plans every few of them."""

    def __init__(self, seed: int = 0) -> None:
        self.tuner, self.random = DepthTuner(), random.Random(seed)
        self.tuner.begin(None, 1)

    def rate(self, running: int, chance: float, slope: float, plans: int = 200) -> float:
        """Return tokens per second over some plans, over those of plain decoding."""
        tokens = total = 0.0
        for _ in range(plans):
            plan = self.tuner.plan(batch(running))
            depth = plan.strategy.depth if plan.strategy else 0
            for _ in range(6):
                accepted = sum(self.draft(depth, chance) for _ in range(running))
                took = seconds(running, depth, slope) * self.random.uniform(0.9, 1.1)
                self.tuner.learn(
                    Outcome(
                        batch=batch(running),
                        plan=plan,
                        timings=(),
                        num_drafts=running if depth else 0,
                        num_nodes=running * depth,
                        num_accepted=accepted,
                        verify_s=took,
                    )
                )
                tokens += running + accepted
                total += took
        return tokens / total * seconds(running, 0, slope) / running

    def draft(self, depth: int, chance: float) -> int:
        accepted = 0
        while accepted < depth and self.random.random() < chance:
            accepted += 1
        return accepted


def best(chance: float, slope: float) -> float:
    """Return the rate of the best fixed depth over plain decoding."""
    return max(
        sum(chance**level for level in range(depth + 1)) / (1 + depth * slope)
        for depth in range(DEEPEST + 1)
    )


@pytest.mark.parametrize(
    ("running", "chance", "slope"), [(1, 0.9, 0.05), (30, 0.7, 0.1), (4, 0.6, 0.3), (4, 0.5, 0.02)]
)
def test_the_rate_comes_near_that_of_the_best_depth(running, chance, slope) -> None:
    engine = Simulated()
    engine.rate(running, chance, slope, plans=60)
    share = 0.87 if running == 1 else 0.92  # one draft a step says little of a chance
    assert engine.rate(running, chance, slope) > share * best(chance, slope)


@pytest.mark.parametrize("slope", [0.1, 0.4])
def test_a_bad_drafter_costs_little(slope: float) -> None:
    engine = Simulated()
    assert engine.rate(8, 0.05, slope, plans=60) > 0.93
    assert engine.rate(8, 0.05, slope) > 0.98


def test_a_better_drafter_is_found_at_once_when_it_is_told_and_later_when_it_is_not() -> None:
    told, untold = Simulated(), Simulated()
    for engine in (told, untold):
        engine.rate(4, 0.02, 0.1)
    told.tuner.reset_estimates()
    assert told.rate(4, 0.8, 0.1, plans=40) > 0.8 * best(0.8, 0.1)
    untold.rate(4, 0.8, 0.1, plans=200)
    assert untold.rate(4, 0.8, 0.1, plans=40) > 0.9 * best(0.8, 0.1)


def test_what_another_number_of_requests_taught_is_used() -> None:
    engine = Simulated()
    engine.rate(16, 0.02, 0.3)
    assert engine.rate(8, 0.02, 0.3, plans=40) > 0.95  # plain first, and hardly a probe


def test_a_first_step_that_compiles_does_not_make_a_bad_drafter_look_good() -> None:
    engine = Simulated()
    plan, none = engine.tuner.plan(batch(8)), {"num_drafts": 0, "num_nodes": 0, "num_accepted": 0}
    for took in (2.0, seconds(8, 0, 0.4)):
        engine.tuner.learn(Outcome(batch=batch(8), plan=plan, timings=(), **none, verify_s=took))
    assert engine.rate(8, 0.05, 0.4, plans=60) > 0.9
