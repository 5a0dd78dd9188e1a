"""Predictions of steps and drafts: curves, what corrects them, and the fit of a draft's parts."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.tuner.cost import CostModel, DraftCost, TimeCurve, fit_draft_cost
from longtail.tuner.messages import Batch, DraftTiming, Outcome, Plan

COUNTS, SECONDS = (1, 8, 64), (1e-3, 1.7e-3, 7.3e-3)
DRAFT = DraftCost(start_s=1e-4, request_s=8e-6, level_s=5e-5, row_s=6e-6)


def curve() -> TimeCurve:
    return TimeCurve(COUNTS, SECONDS)


def model() -> CostModel:
    costs = CostModel(curve(), pair_s=1e-7, node_pair_s=2e-8)
    costs.drafts = [DRAFT]
    return costs


def outcome(verify_s: float, *, timings: tuple[DraftTiming, ...] = ()) -> Outcome:
    """A step of eight requests."""
    return Outcome(
        batch=Batch(num_draftable=8, num_sampled=8, num_tokens=8, num_pairs=800, room=500),
        plan=Plan(strategy=None),
        timings=timings,
        num_drafts=len(timings),
        num_nodes=0,
        num_accepted=0,
        verify_s=verify_s,
    )


Sketch = tuple[list[int], list[float], list[tuple[int, float]]]
"""Counts, seconds, and corrections: places from the first count on, and errors."""


@st.composite
def any_sketch(draw: st.DrawFn) -> Sketch:
    """Any measurement, falling ones too; the curve is made outside, its checks use `random`."""
    counts = sorted(draw(st.sets(st.integers(1, 400), min_size=1, max_size=6)))
    errors = st.tuples(st.integers(counts[0], 500), st.floats(-3.0, 3.0))
    seconds = [draw(st.floats(1e-4, 1e-1)) for _ in counts]
    return counts, seconds, draw(st.lists(errors, max_size=4))


def curve_of(sketch: Sketch) -> TimeCurve:
    counts, seconds, errors = sketch
    found = TimeCurve(counts, seconds)
    for count, error in errors:
        found.correct(count, error)
    return found


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(1, 1e-3), (8, 1.7e-3), (64, 7.3e-3), (3, 1.2e-3), (36, 4.5e-3), (120, 12.9e-3)],
    ids=["first", "knot", "last", "between", "further", "beyond"],
)
def test_between_knots_and_beyond_them_time_is_linear(count, seconds):
    assert curve().at(count) == pytest.approx(seconds)


@given(any_sketch(), st.lists(st.integers(1, 600), min_size=2, max_size=8))
def test_a_curve_never_decreases_and_predicts_many_counts_as_one_by_one(sketch, counts):
    found, first = curve_of(sketch), sketch[0][0]
    asked = [max(count, first) for count in sorted(counts)]
    times = [found.at(count) for count in asked]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    assert times[0] > 0
    assert found.at_each(np.array(asked)).tolist() == pytest.approx(times)


def test_corrections_find_a_machine_three_times_slower():
    found = curve()
    for step in range(600):
        count = (1, 5, 40, 100)[step % 4]
        found.correct(count, math.log(3 * curve().at(count) / found.at(count)))
    for count in (1, 5, 40, 100):
        assert found.at(count) == pytest.approx(3 * curve().at(count), rel=0.05)


def test_a_stall_moves_a_settled_curve_by_two_percent_at_most():
    found = curve()
    for _ in range(16):
        found.correct(8, 0.0)
    before = [found.at(count) for count in (1, 8, 64)]
    found.correct(8, math.log(1000.0))
    after = [found.at(count) for count in (1, 8, 64)]
    assert all(1.0 < new / old < 1.02 for new, old in zip(after, before, strict=True))
    other = curve()
    for _ in range(16):
        other.correct(8, 0.0)
    other.correct(8, 0.3)  # a step that took a third too long
    assert other.at(8) == pytest.approx(found.at(8))


def test_a_slow_step_raises_its_own_kind_and_the_other():
    timing = DraftTiming(drafter=0, num_requests=8, levels=2, rows=16, seconds=1.0)
    for drafted in ((), (timing,)):
        costs = model()
        batch, usual = outcome(1.0).batch, DRAFT.seconds(8, 2.0, 16.0)
        plain, verify = costs.plain_s(batch), costs.verify_s(batch, 0)
        costs.learn(outcome(2 * plain, timings=drafted))
        assert costs.plain_s(batch) > plain
        assert costs.verify_s(batch, 0) > verify
        assert (costs.drafts[0].seconds(8, 2.0, 16.0) > usual) == bool(drafted)


ROUNDS = [
    (num, levels, num * levels - levels // 2) for num in (1, 8, 32) for levels in (0, 1, 3, 6)
]


def test_a_fit_recovers_the_cost_that_made_the_rounds():
    rounds = [(*each, DRAFT.seconds(each[0], float(each[1]), float(each[2]))) for each in ROUNDS]
    found = fit_draft_cost(rounds)
    for name in ("start_s", "request_s", "level_s", "row_s"):
        assert getattr(found, name) == pytest.approx(getattr(DRAFT, name), rel=1e-6)


@given(st.lists(st.tuples(st.sampled_from(ROUNDS), st.floats(1e-6, 1e-1)), min_size=1))
def test_no_part_of_a_fit_is_below_zero_and_none_is_free(rounds):
    found = fit_draft_cost([(*each, seconds) for each, seconds in rounds])
    assert found.start_s > 0
    assert min(found.request_s, found.level_s, found.row_s) >= 0
