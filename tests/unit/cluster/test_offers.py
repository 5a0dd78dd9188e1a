"""The decision of a worker about offered drafter weights."""

import math

import pytest

from longtail.cluster.drafter.offers import Offer, judge
from support.fake_worker import drafter


def offered(quality: float, *, digest: str | None = None) -> Offer:
    weights = drafter(4, quality)
    return Offer(
        weights=weights,
        digest=weights.digest if digest is None else digest,
        before=2.31,
        after=2.52,
    )


def test_whole_weights_are_adopted_with_their_measurement():
    verdict = judge(offered(2.5))
    assert (verdict.version, verdict.is_adopted, verdict.reason) == (4, True, "")
    assert (verdict.before, verdict.after) == (2.31, 2.52)


def test_weights_that_changed_on_their_way_are_refused():
    verdict = judge(offered(2.5, digest=drafter(4, 2.4).digest))
    assert (verdict.is_adopted, verdict.reason) == (False, "they are not what was sent")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused(value):
    verdict = judge(offered(value))
    assert (verdict.is_adopted, verdict.reason) == (False, "they are not finite")
