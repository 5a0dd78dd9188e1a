"""The depth of drafts: exact, and predicted without reading gains."""

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.strategy import (
    REMEMBERED,
    DepthPolicy,
    ExactDepth,
    PredictedDepth,
)

SURPLUSES = st.lists(st.floats(-2.0, 60.0, width=32), max_size=7)


def draft(policy: DepthPolicy, gains: Sequence[float]) -> int:
    """The depth of a round in which levels would be worth this; one deeper than they are many."""
    known: list[torch.Tensor] = []
    depth = 1
    for gain in gains:
        known.append(torch.tensor(gain, dtype=torch.float64))
        if not policy.should_extend(known):
            break
        depth += 1
    if known:
        policy.learn([float(each) for each in known])
    return depth


@given(st.lists(SURPLUSES, max_size=12), SURPLUSES)
def test_behind_any_change_the_depth_becomes_that_of_a_look(past, constant):
    """However wrong what is remembered: it is forgotten, then each round goes a level deeper."""
    policy = PredictedDepth()
    for gains in past:
        draft(policy, gains)
    looked = draft(ExactDepth(), constant)
    depths = [draft(policy, constant) for _ in range(REMEMBERED + looked + 3)]
    for number, depth in enumerate(depths[REMEMBERED:], start=1):
        assert min(number, looked) <= depth <= looked
    assert depths[-3:] == [looked] * 3


def test_a_level_is_drafted_if_it_pays_on_average():
    """Not in every round: what it gains in some must be more than it loses in the others."""
    for poor, depth in ((-0.4, 3), (-0.6, 2)):
        policy = PredictedDepth()
        rounds = [[1.0, 0.5], [1.0, poor]]
        found = [draft(policy, rounds[number % 2]) for number in range(10 * REMEMBERED)]
        assert set(found[REMEMBERED::2]) == {depth}


def test_predicted_depth_reads_no_gain():
    policy, unread = PredictedDepth(), torch.tensor(0.0, device="meta")
    policy.learn([0.5, -0.5])
    assert policy.should_extend([unread])
    assert not policy.should_extend([unread, unread])
    assert not policy.should_extend([unread, unread, unread]), "nothing is known of it"
