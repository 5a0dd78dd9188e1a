"""Law 9: the tuner's regret shrinks; it recovers after a shift; plain decoding is never left out.

On an engine made of arithmetic, where the truth is known: a step takes a + b x tokens, with noise,
and stalls, and how often nodes are right may shift. Regret is what is lost against an oracle that
plays the best fixed chain, or none, for each number of requests. Expected tokens are counted, so
that only the decisions matter.
"""

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import pytest

from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import Accepted, DraftTree, follow, keep_reached, prune
from longtail.tuner.budget_tuner import BudgetTuner
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.guard import Guard
from longtail.tuner.messages import Batch, DraftTiming, Outcome, Plan
from longtail.tuner.tuner import PLAIN, FixedTuner, Tuner
from support.worked import chain, confidences

LIKELY, DOUBTFUL = 3.0, 0.3
"""Margins of nodes."""
DEEPEST = 16
DRAWS = np.random.default_rng(0).random((512, 64, DEEPEST + 1, 2)).tolist()
"""Uniform numbers by step, request and depth; steps repeat."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of steps without disturbance."""

    step_s: float = 1e-3
    token_s: float = 5e-5

    def verify_s(self, num_tokens: int) -> float:
        """Return the seconds of a step of `num_tokens`."""
        return self.step_s + self.token_s * num_tokens

    def costs(self, drafts: Sequence[DraftCost]) -> CostModel:
        """Return the cost model of an exact profile."""
        counts = (1, 8, 64, 512)
        curve = TimeCurve(counts, [self.verify_s(count) for count in counts])
        model = CostModel(curve, pair_s=0.0, node_pair_s=0.0)
        model.drafts = list(drafts)
        return model


QUICK, SLOW = Machine(), Machine(token_s=4e-4)
"""SLOW: verification is dear, and drafting pays for few requests only."""
DRAFT = DraftCost(start_s=1e-4, request_s=1e-5, level_s=5e-5, row_s=8e-6)
HISTORY = DraftCost(start_s=1e-5, request_s=1e-5, level_s=0.0, row_s=1e-6)
BLOCK = DraftCost(start_s=2e-5, request_s=2e-6, level_s=1e-5, row_s=1e-6)


@dataclass(frozen=True, slots=True)
class Truth:
    """Probabilities that nodes are right, given their parents."""

    likely: float
    doubtful: float
    share: float = 0.7
    """Share of nodes that look likely."""

    def mean(self) -> float:
        """Return the mean over all nodes."""
        return self.share * self.likely + (1 - self.share) * self.doubtful


GOOD, MEDIOCRE, BAD = Truth(0.97, 0.6), Truth(0.7, 0.3), Truth(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Shifting:
    """One drafter, whose nodes look likely or doubtful; how often they are right may shift."""

    truth: Callable[[int], Truth]
    costs: Sequence[DraftCost] = (DRAFT,)

    def propose(self, step, index, strategy, curve, num):
        thresholds, table = strategy.thresholds, confidences(curve, (LIKELY, DOUBTFUL))
        looks = [self._looks(step, i) for i in range(num)]
        reach: list[list[float]] = [[] for _ in range(num)]
        going_on = list(range(num))
        for depth in range(strategy.depth):
            for i in going_on:
                sure = table[looks[i][depth] == DOUBTFUL]
                reach[i].append((reach[i][-1] if reach[i] else 1.0) * sure)
            going_on = [i for i in going_on if reach[i][-1] >= thresholds.expand]
            gain = sum(reach[i][-1] - thresholds.expand for i in going_on)
            if not going_on or gain < thresholds.level:
                break
        pairs = zip(looks, reach, strict=True)
        trees = [chain((1,) * len(by), by, margins[: len(by)]) for margins, by in pairs]
        return [prune(keep_reached(each, thresholds.verify), strategy.num_nodes) for each in trees]

    def text(self, step, request):
        draws, chances = DRAWS[step % 512][request], self._chances(step, request)
        return [int(drawn < chance) for (_, drawn), chance in zip(draws, chances, strict=True)]

    def expected(self, step, request, tree):
        return sum(accumulate(self._chances(step, request)[: tree.size], operator.mul))

    def _looks(self, step: int, request: int) -> list[float]:
        share = self.truth(step).share
        return [LIKELY if drawn < share else DOUBTFUL for drawn, _ in DRAWS[step % 512][request]]

    def _chances(self, step: int, request: int) -> list[float]:
        truth = self.truth(step)
        looks = self._looks(step, request)
        return [truth.likely if each == LIKELY else truth.doubtful for each in looks]


def constant(truth: Truth) -> Shifting:
    return Shifting(lambda _: truth)


@dataclass(frozen=True, slots=True)
class Source:
    """A drafter of one token, which no other drafter proposes."""

    token: int
    first: float
    """Probability that the text goes on with this token after a root."""
    next: float
    """Probability that it goes on so after a node that was right."""
    cost: DraftCost


@dataclass(frozen=True, slots=True)
class Sources:
    """Drafters of which one at most is right; each proposes a doubtful node, then likely ones."""

    sources: Sequence[Source]

    @property
    def costs(self):
        return [source.cost for source in self.sources]

    def propose(self, step, index, strategy, curve, num):
        margins = (DOUBTFUL, *(LIKELY,) * (strategy.depth - 1))
        reach = tuple(accumulate(confidences(curve, margins), operator.mul))
        least = max(strategy.thresholds.verify, strategy.thresholds.expand)
        size = sum(each >= least for each in reach) + 1
        tree = chain((self.sources[index].token,) * strategy.depth, reach, margins)
        return [keep_reached(prune(tree, size), strategy.thresholds.verify)] * num

    def text(self, step, request):
        (drawn, _), *draws = DRAWS[step % 512][request]
        for source in self.sources:
            if 0 <= drawn < source.first:
                count = next((i for i, (u, _) in enumerate(draws) if u >= source.next), len(draws))
                return [source.token] * (1 + count) + [0]
            drawn -= source.first
        return [0]

    def expected(self, step, request, tree):
        counts = {source: tree.tokens.count(source.token) for source in self.sources}
        return sum(s.first * s.next**depth for s, count in counts.items() for depth in range(count))


@dataclass(slots=True)
class Run:
    """Steps of a simulated engine: expected tokens, undisturbed seconds, and what was planned."""

    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def rate(self, begin: int = 0, end: int | None = None) -> float:
        """Tokens a second over some steps."""
        return sum(self.tokens[begin:end]) / sum(self.seconds[begin:end])


def simulate(
    tuner: Tuner,
    world: Shifting | Sources,
    *,
    steps: int,
    running: Callable[[int], int],
    machine: Machine = QUICK,
    guarded: bool = False,
) -> Run:
    """Run a tuner, which learns one step late; `running` is a function of the step."""
    rng, run, costs = random.Random(0), Run(), machine.costs(world.costs)
    curves = [ConfidenceCurve() for _ in world.costs]
    guard = Guard(costs) if guarded else None
    tuner.begin(costs, len(world.costs))
    pending: list[tuple[Outcome, list[tuple[int, DraftTree, Accepted]]]] = []
    for step in range(steps):
        num = running(step)
        batch = _batch(num)
        plan = tuner.plan(batch) if guard is None or guard.allows(batch) else PLAIN
        timings: list[DraftTiming] = []
        proposals: list[list[DraftTree]] = []
        for index in plan.drafters if plan.strategy is not None else ():
            asked = plan.num_requests or num
            trees = world.propose(step, index, plan.strategy, curves[index], min(asked, num))
            proposals.append(trees)
            timings.append(_timing(index, world.costs[index], trees))
        selected = tuner.select_nodes(batch, plan, proposals) if proposals else []
        accepted, followed = 0, []
        for place, tree in enumerate(selected):
            text = world.text(step, place)
            kept = len(follow(tree, text).path)
            accepted += kept
            for index, trees in zip(plan.drafters, proposals, strict=True):
                found = follow(trees[place], text[: kept + 1])  # with the bonus token
                followed.append((index, trees[place], found))
        took = machine.verify_s(num + sum(tree.size for tree in selected))
        outcome = Outcome(
            batch=batch,
            plan=plan,
            timings=tuple(
                replace(each, seconds=each.seconds * _disturbed(rng)) for each in timings
            ),
            num_drafts=len(selected),
            num_nodes=sum(tree.size for tree in selected),
            num_accepted=accepted,
            verify_s=took * _disturbed(rng),
            num_expected=sum((sum(tree.reach) for tree in selected), 0.0),
        )
        for previous, learned in pending:
            for index, tree, found in learned:
                curves[index].learn(tree, found)
            costs.learn(previous)
            tuner.learn(previous)
            if guard is not None and (reason := guard.learn(previous)):
                run.reasons.append(reason)
        pending = [(outcome, followed)]
        expected = sum(world.expected(step, place, tree) for place, tree in enumerate(selected))
        run.tokens.append(num + expected)
        run.seconds.append(took + sum(timing.seconds for timing in timings))
        run.plans.append(plan)
    return run


def _batch(num: int) -> Batch:
    return Batch(num_draftable=num, num_sampled=num, num_tokens=num, num_pairs=0, room=512 - num)


def _timing(drafter: int, cost: DraftCost, trees: Sequence[DraftTree]) -> DraftTiming:
    """Return the undisturbed timing of a drafter's chains."""
    rows, levels = sum(tree.size for tree in trees), max(tree.size for tree in trees)
    seconds = cost.seconds(len(trees), float(levels), float(rows))
    return DraftTiming(
        drafter=drafter, num_requests=len(trees), levels=levels, rows=rows, seconds=seconds
    )


def _disturbed(rng: random.Random) -> float:
    """Return a noise factor, with rare stalls."""
    return rng.lognormvariate(0.0, 0.05) * (50.0 if rng.random() < 0.01 else 1.0)


def oracle_rate(truth: Truth, num: int, machine: Machine = QUICK) -> float:
    """Return the tokens per second of the best fixed chain, or of plain decoding."""
    rates, accepted = [num / machine.verify_s(num)], 0.0
    for depth in range(1, DEEPEST + 1):
        accepted += truth.mean() ** depth
        draft_s = DRAFT.seconds(num, float(depth), float(num * depth))
        rates.append(num * (1 + accepted) / (draft_s + machine.verify_s(num * (1 + depth))))
    return max(rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "num", "machine"),
    [
        *((GOOD, 1, QUICK), (GOOD, 16, SLOW), (GOOD, 64, QUICK)),
        *((MEDIOCRE, 1, SLOW), (MEDIOCRE, 16, QUICK), (MEDIOCRE, 64, SLOW)),
    ],
)
def test_the_budget_is_as_good_as_the_oracle_within_three_percent(truth, num, machine):
    """Better, where it may draft for each request as far as that one is worth it."""
    run = simulate(
        BudgetTuner(), constant(truth), steps=2400, running=lambda _: num, machine=machine
    )
    assert run.rate(1800) > 0.97 * oracle_rate(truth, num, machine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "machine", "block_first"),
    [
        *((1, QUICK, 0.3), (4, QUICK, 0.3), (32, QUICK, 0.3), (4, SLOW, 0.3)),
        *((4, QUICK, 0.0), (32, QUICK, 0.5)),
    ],
)
def test_two_drafters_are_at_least_as_fast_as_the_better_one(num, machine, block_first):
    """They propose other tokens; what the worse one costs is less than two percent."""

    def rate(*sources: Source) -> float:
        world = Sources(sources)
        run = simulate(BudgetTuner(), world, steps=1500, running=lambda _: num, machine=machine)
        return run.rate(750)

    history = Source(5, first=0.3, next=0.8, cost=HISTORY)
    block = Source(6, first=block_first, next=0.6, cost=BLOCK)
    alone, together = (rate(history), rate(block)), rate(block, history)
    assert together > 0.98 * max(num / machine.verify_s(num), *alone)
    if block_first == 0.3 and machine is QUICK and num <= 4:  # each is right where the other is not
        assert together > 1.02 * max(alone)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 16])
def test_a_shift_of_the_drafter_is_followed_both_ways(num):
    """Good, useless, good again: some time after each shift the best of the time is played."""
    phase = 2000
    world = Shifting(lambda step: BAD if phase <= step < 2 * phase else GOOD)
    run = simulate(BudgetTuner(), world, steps=3 * phase, running=lambda _: num)
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

    world = Shifting(lambda step: BAD if step < swapped else GOOD)
    run = simulate(tuner, world, steps=swapped + 300, running=running)
    assert run.rate(swapped + 100) > 0.97 * oracle_rate(GOOD, 4)


def test_a_batch_that_shrinks_is_followed_at_once():
    """64 running, where drafting loses on this machine, down to 1, where it wins."""

    def running(step: int) -> int:
        return max(1, 64 - step // 30)

    run = simulate(BudgetTuner(), constant(GOOD), steps=2400, running=running, machine=SLOW)
    best = sum(run.tokens[step] / oracle_rate(GOOD, running(step), SLOW) for step in range(2400))
    assert sum(run.seconds) < 1.03 * best
    drafted = [plan.strategy is not None and not plan.is_probe for plan in run.plans]
    assert sum(drafted[:300]) < 60
    assert sum(drafted[-100:]) >= 98


def test_a_batch_that_halves_is_probed_at_once():
    """Useless for so long at 64 running that probes are rare, then good, with 4 running."""
    world = Shifting(lambda step: BAD if step < 1500 else GOOD)
    run = simulate(BudgetTuner(), world, steps=1800, running=lambda step: 64 if step < 1600 else 4)
    assert run.rate(1650) > 0.95 * oracle_rate(GOOD, 4)


@pytest.mark.parametrize("num", [1, 8, 64])
def test_a_prompt_does_not_lower_the_price_of_time(num):
    """A step that reads 8 prompts of 100 tokens plans what the decoding after it plans."""
    decoding = Batch(num_draftable=num, num_sampled=num, num_tokens=num, num_pairs=num, room=500)
    reading = replace(decoding, num_tokens=num + 800, num_pairs=num + 800)
    plans = []
    for batch in (decoding, reading):
        tuner = BudgetTuner()
        tuner.begin(SLOW.costs([DRAFT]), 1)
        plans.append(tuner.plan(batch))
    assert plans[0] == plans[1]


@pytest.mark.parametrize(("num", "guarded"), [(1, False), (8, True), (64, False)])
def test_a_useless_drafter_costs_next_to_nothing(num, guarded):
    run = simulate(BudgetTuner(), constant(BAD), steps=4000, running=lambda _: num, guarded=guarded)
    assert run.rate() > 0.98 * num / QUICK.verify_s(num)
    looks = [step for step, plan in enumerate(run.plans) if plan.is_probe and plan.strategy]
    assert looks, "it goes on looking"
    assert len(looks) < 40


@pytest.mark.parametrize("depth", [1, 4, 16])
@pytest.mark.parametrize("running", [1, 48])
def test_a_useless_drafter_loses_one_percent_with_any_strategy(depth, running):
    """Beside the grant, and the step in which the account runs out."""
    fixed = FixedTuner(Strategy(depth=depth))
    run = simulate(fixed, constant(BAD), steps=6000, running=lambda _: running, guarded=True)
    plain_s = [QUICK.verify_s(running) * tokens / running for tokens in run.tokens]
    lost_s = sum(run.seconds) - sum(plain_s)
    assert lost_s < 0.011 * sum(run.seconds) + 24 * QUICK.verify_s(running)
    drafted = [plan.strategy is not None for plan in run.plans]
    assert any(drafted[3000:])  # it may always try again
    assert "paused" in run.reasons[0]
