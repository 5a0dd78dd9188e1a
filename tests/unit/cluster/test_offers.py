"""The decision of a worker about offered drafter weights."""

import math

import pytest

from longtail.cluster.drafter.offers import Offer, judge
from longtail.drafter.eagle.weights import DrafterWeights
from support.fake_worker import drafter

SERVED = drafter(3, 2.0)


def offered(quality: float, *, digest: str | None = None) -> Offer:
    weights = drafter(4, quality)
    return Offer(weights=weights, digest=weights.digest if digest is None else digest, texts=())


def never_probed(served: DrafterWeights, offer: Offer) -> tuple[float, float]:
    raise AssertionError("damaged weights must not be measured")


@pytest.mark.parametrize(("before", "after"), [(2.0, 2.5), (2.0, 2.0), (math.nan, math.nan)])
def test_weights_that_do_no_worse_are_adopted(before, after):
    measured = []

    def probe(served: DrafterWeights, offer: Offer) -> tuple[float, float]:
        measured.append((served.version, offer.weights.version))
        return before, after

    verdict = judge(offered(2.5), SERVED, probe)
    assert (verdict.version, verdict.is_adopted, verdict.reason) == (4, True, "")
    assert (verdict.before, verdict.after) == pytest.approx((before, after), nan_ok=True)
    assert measured == [(3, 4)]


def test_weights_that_measure_worse_are_refused_with_both_numbers():
    verdict = judge(offered(9.0), SERVED, lambda served, offer: (2.31, 2.125))
    assert not verdict.is_adopted
    assert verdict.reason == "2.125 on recent texts, 2.310 before"
    assert (verdict.before, verdict.after) == (2.31, 2.125)


def test_weights_that_changed_on_their_way_are_refused_unmeasured():
    verdict = judge(offered(2.5, digest=drafter(4, 2.4).digest), SERVED, never_probed)
    assert (verdict.is_adopted, verdict.reason) == (False, "they are not what was sent")
    assert math.isnan(verdict.before)
    assert math.isnan(verdict.after)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_unmeasured(value):
    verdict = judge(offered(value), SERVED, never_probed)
    assert (verdict.is_adopted, verdict.reason) == (False, "they are not finite")
