"""Confidence curves: what is counted, what is learned from it, and that errors are owned up to."""

import math
from bisect import bisect_right
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted
from worked import TREE, TREE_ACCEPTED

RIGHT, WRONG = Accepted(path=(1,), tokens=(5, 0)), Accepted(path=(), tokens=(0,))


def one_node(margin: float) -> DraftTree:
    return DraftTree(tokens=(5,), parents=(0,), margins=(margin,))


def confidence(curve: ConfidenceCurve, margin: float) -> float:
    return curve.confidences([margin])[0]


def teach(curve: ConfidenceCurve, margin: float, hits: float, number: int, seed: int = 0) -> None:
    """Show a margin `number` times, right with probability `hits`."""
    rng = Random(seed)
    for _ in range(number):
        curve.learn(one_node(margin), RIGHT if rng.random() < hits else WRONG)


def test_before_anything_is_seen_a_margin_is_taken_for_log_odds():
    table = ConfidenceCurve().table()
    assert len(table) == len(EDGES) + 1
    assert table == sorted(table)
    # The bin from 2 to 3 nats has its prior at 2.5.
    assert confidence(ConfidenceCurve(), 2.2) == pytest.approx(1 / (1 + math.exp(-2.5)))
    assert ConfidenceCurve().calibration_error() == 0.0


def test_a_bin_holds_its_lower_bound():
    table = ConfidenceCurve().table()
    assert ConfidenceCurve().confidences([-math.inf, 0.0, 0.24, 0.25, 12.0, math.inf]) == [
        table[0],
        table[6],
        table[6],
        table[7],
        table[-1],
        table[-1],
    ]


def test_nodes_count_where_verification_reached_their_parent():
    """The worked tree, root and nodes 1 and 3 reached: only node 2 of the siblings is wrong."""
    curve = ConfidenceCurve()
    before = list(curve.table())
    curve.learn(TREE, TREE_ACCEPTED)
    hits = {2.0: 1, -2.0: 0, 0.7: 1, 1.1: 0}
    for margin, hit in hits.items():
        place = bisect_right(EDGES, margin)
        assert curve.table()[place] == pytest.approx((8 * before[place] + hit) / 9)
    assert sum(a != b for a, b in zip(curve.table(), before, strict=True)) == len(hits)


def test_nodes_below_a_wrong_one_tell_nothing():
    curve = ConfidenceCurve()
    before = list(curve.table())
    curve.learn(TREE, WRONG)
    untold = [bisect_right(EDGES, margin) for margin in (0.7, 1.1)]
    assert [curve.table()[place] for place in untold] == [before[place] for place in untold]
    assert confidence(curve, 2.0) == pytest.approx(8 / 9 * before[bisect_right(EDGES, 2.0)])


def test_a_curve_learns_a_known_function():
    truth = {-1.5: 0.6, 0.1: 0.05, 1.2: 0.5, 5.0: 0.9}  # not even monotone
    curve = ConfidenceCurve()
    for margin, hits in truth.items():
        teach(curve, margin, hits, 3000)
    for margin, hits in truth.items():
        # Four standard deviations of a mean of 3000, and a prior of weight 8.
        assert confidence(curve, margin) == pytest.approx(hits, abs=4 * 0.5 / 3000**0.5 + 8 / 3000)


def test_a_curve_follows_a_drift():
    """A bin forgets over 4000 observations: 12000 later, e**-3 of the old belief is left."""
    curve = ConfidenceCurve()
    teach(curve, 1.2, 0.9, 8000)
    teach(curve, 1.2, 0.2, 12000, seed=1)
    assert confidence(curve, 1.2) == pytest.approx(0.2 + 0.7 * math.exp(-3), abs=0.03)


def test_on_calibrated_data_the_calibration_error_goes_to_zero():
    curve = ConfidenceCurve()
    prior = ConfidenceCurve().table()
    for place, margin in enumerate((-9.0, *EDGES)):
        teach(curve, margin, prior[place], 3000, seed=place)
    # 51000 outcomes in ten bins: sum of |noise| below 10 * 2 * 0.5 * sqrt(5100) / 51000 = 0.014
    assert curve.calibration_error() < 0.014


def test_the_calibration_error_is_taken_before_an_outcome_is_learned():
    """Learning first would always look a little better than it was."""
    curve = ConfidenceCurve()
    believed = confidence(curve, 20.0)
    curve.learn(one_node(20.0), WRONG)
    assert curve.calibration_error() == pytest.approx(believed)
    then = confidence(curve, 20.0)
    curve.learn(one_node(20.0), WRONG)
    assert curve.calibration_error() == pytest.approx((believed + then) / 2)


def test_early_errors_stay_on_the_record():
    """Sure and always wrong, until it knows better: the error shrinks only as 1 / outcomes."""
    curve = ConfidenceCurve()
    teach(curve, 20.0, 0.0, 100)
    early = curve.calibration_error()
    assert early > 0.15  # the predictions were 8 / (8 + n): their mean over 100 is 0.2
    teach(curve, 20.0, 0.0, 900)
    assert early / 10 < curve.calibration_error() < early / 2


@given(st.lists(st.tuples(st.floats(-50, 50), st.booleans()), max_size=60))
def test_confidences_stay_probabilities(outcomes):
    curve = ConfidenceCurve()
    for margin, hit in outcomes:
        curve.learn(one_node(margin), RIGHT if hit else WRONG)
    assert all(0.0 < p < 1.0 for p in curve.table())
    assert 0.0 <= curve.calibration_error() <= 1.0
