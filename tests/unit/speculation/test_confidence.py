"""Confidence curves: what is counted, what is learned from it, and that errors are owned up to."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.tree import Accepted, DraftTree, follow
from support.worked import confidences

RIGHT, WRONG = Accepted(path=(1,), tokens=(5, 0)), Accepted(path=(), tokens=(0,))


def one_node(margin: float) -> DraftTree:
    return DraftTree(tokens=(5,), parents=(0,), margins=(margin,))


def confidence(curve: ConfidenceCurve, margin: float) -> float:
    return confidences(curve, [margin])[0]


def teach(curve: ConfidenceCurve, margin: float, hits: float, number: int) -> None:
    """Show a margin `number` times, right with probability `hits`; ask after each."""
    rng = Random(0)
    for _ in range(number):
        curve.learn(one_node(margin), RIGHT if rng.random() < hits else WRONG)
        curve.table()


def test_before_anything_is_seen_a_margin_is_taken_for_log_odds():
    table = ConfidenceCurve().table()
    assert len(table) == len(EDGES) + 1
    assert table == sorted(table)
    # The bin from 2 to 3 nats has its prior at 2.5.
    assert confidence(ConfidenceCurve(), 2.2) == pytest.approx(1 / (1 + math.exp(-2.5)))


def test_nodes_after_the_known_tokens_do_not_count():
    """`follow` may end with the text: after the last of its tokens nothing is known."""
    chain = DraftTree(tokens=(5, 7), parents=(0, 1), margins=(2.0, -2.0))
    curve, other = ConfidenceCurve(), ConfidenceCurve()
    curve.learn(chain, follow(chain, []))
    assert curve.table() == ConfidenceCurve().table()
    curve.learn(chain, follow(chain, [5]))
    other.learn(one_node(2.0), RIGHT)
    assert curve.table() == other.table()
    curve.learn(chain, follow(chain, [5, 8]))
    assert confidence(curve, -2.0) < confidence(other, -2.0)


def test_a_curve_learns_a_known_function():
    truth = {-1.5: 0.6, 0.1: 0.05, 1.2: 0.5, 5.0: 0.9}  # not even monotone
    curve = ConfidenceCurve()
    for margin, hits in truth.items():
        teach(curve, margin, hits, 3000)
    for margin, hits in truth.items():
        # Fading over 1000 observations, a mean has the deviation of one of 2000; five of those,
        # and a prior of weight 8.
        assert confidence(curve, margin) == pytest.approx(hits, abs=5 * 0.5 / 2000**0.5 + 8 / 1000)


@pytest.mark.parametrize("margins", [(5.0,), (2.5, 3.5, 5.0, 7.0, 10.0)])
def test_an_overconfident_drafter_is_detected_after_fifteen_nodes(margins):
    curve = ConfidenceCurve()
    for number in range(15):
        curve.learn(one_node(margins[number % len(margins)]), WRONG)
    # Trust is (0 + 2) / (15 * 0.9 + 2) or less.
    assert all(p <= 0.13 for p in curve.table())


@given(st.lists(st.tuples(st.floats(-50, 50), st.booleans()), max_size=60))
def test_confidences_stay_probabilities(outcomes):
    curve = ConfidenceCurve()
    for margin, hit in outcomes:
        curve.learn(one_node(margin), RIGHT if hit else WRONG)
    assert all(0.0 < p <= 0.999 for p in curve.table())
