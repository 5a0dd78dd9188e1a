"""Versions of the drafter: only those that measure better, and never the same one twice."""

import math

import pytest
import torch

from longtail.cluster.work.drafter_versions import MIN_GAIN, DrafterVersions
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.weights import weighted_mean
from support.fake_worker import drafter
from support.spot_training import replica


def versions() -> DrafterVersions:
    return DrafterVersions(drafter(0, 2.0), DrafterBuffer(10**6, seed=0))


@pytest.mark.parametrize("gain", [-0.1, 0.0, MIN_GAIN / 2, math.nan, math.inf])
def test_a_replica_that_measures_no_better_is_not_offered(gain):
    one = versions()
    assert one.offer([replica(gain)]) is None
    (decision,) = one.drain_decisions()
    assert (decision.what, decision.before, decision.num_tokens) == ("kept", 2.0, 100)
    assert decision.reason
    assert one.published.version == 0


def test_a_better_replica_is_offered_and_published_once_adopted():
    one = versions()
    offer = one.offer([replica(0.1, weight=3.0)])
    assert offer is not None
    assert offer.version == 1
    assert one.published.version == 0, "no worker serves it yet"
    one.publish(offer)
    assert one.published is offer
    assert one.accept_len == pytest.approx(2.2)
    decisions = one.drain_decisions()
    assert [(each.what, each.version) for each in decisions] == [
        ("trained", 0),
        ("offered", 1),
        ("published", 1),
    ]
    assert [(each.before, each.after) for each in decisions[1:]] == [(2.0, pytest.approx(2.2))] * 2


def test_replicas_are_merged_in_proportion_to_their_tokens():
    one = versions()
    offer = one.offer(
        [
            replica(0.1, weight=1.0, tokens=300),
            replica(0.2, weight=5.0, tokens=100),
            replica(-0.1, weight=100.0, tokens=100),
        ]
    )
    assert offer is not None
    assert offer.tensors["w"].item() == 2.0
    decided = [(each.what, each.version) for each in one.drain_decisions()]
    assert decided == [("trained", 0), ("trained", 0), ("kept", 0), ("offered", 1)]


def test_equal_replicas_keep_every_bit():
    dtype = torch.bfloat16
    values = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    mean = weighted_mean([{"w": values}] * 3, [3, 7, 1])["w"]
    assert mean.dtype == dtype
    assert torch.equal(mean, values)


def test_a_replica_that_is_not_finite_is_left_out_and_recorded():
    one = versions()
    broken = replica(0.5, weight=math.nan)
    offer = one.offer([replica(0.1, weight=4.0), broken])
    assert offer is not None
    assert offer.tensors["w"].item() == 4.0
    decisions = one.drain_decisions()
    assert [each.reason for each in decisions if each.what == "kept"] == ["it is not finite"]
