"""The forecast of drafter training: from measured replicas to seconds."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.drafter.training.gain import DrafterGain
from longtail.drafter.training.replica import Replica

ROLLOUT_S = 20.0
amounts = st.floats(0.01, 100.0)


def replica(gain: float, seconds: float, *, base: int = 0) -> Replica:
    return Replica(
        base_version=base,
        weights={},
        num_tokens=1,
        seconds=seconds,
        accept_len=2.0 * (1.0 + gain),
        base_accept_len=2.0,
    )


@given(st.lists(st.tuples(st.floats(-0.5, 2.0), amounts), max_size=6), amounts, amounts)
def test_a_gain_is_positive_rises_with_the_time_and_never_exceeds_the_rollouts(
    seen, seconds, rollout_s
):
    gain = DrafterGain()
    for base, (rise, took_s) in enumerate(seen):
        gain.record(0, replica(rise, took_s, base=base))
    found = gain.gain_s(seconds, rollout_s)
    assert 0.0 < found <= gain.gain_s(2 * seconds, rollout_s) * (1 + 1e-12)
    assert found <= 3 * rollout_s
    assert gain.gain_s(0.0, rollout_s) == 0.0
    assert gain.gain_s(seconds, 2 * rollout_s) == pytest.approx(2 * found)


def test_each_rise_and_each_second_is_counted_once():
    """A candidate is read several times, and its successor has its rise and its seconds."""
    often, once = DrafterGain(), DrafterGain()
    for one in (replica(0.1, 2.0), replica(0.1, 2.0), replica(0.3, 5.0), replica(0.3, 5.0)):
        often.record(1, one)
    once.record(1, replica(0.3, 5.0))
    assert often.gain_s(1.0, ROLLOUT_S) == pytest.approx(once.gain_s(1.0, ROLLOUT_S))
    once.record(1, replica(0.3, 5.0, base=1))
    assert often.gain_s(1.0, ROLLOUT_S) != pytest.approx(once.gain_s(1.0, ROLLOUT_S), rel=1e-3)


@pytest.mark.parametrize("nothing", [-0.1, 0.0, math.nan])
def test_a_drafter_that_rises_no_more_is_paused_and_tried_again(nothing):
    gain, trained = DrafterGain(), list[bool]()
    for rollout in range(40):
        gain.begin_rollout()
        share_s = gain.share_s(ROLLOUT_S)
        trained.append(share_s > 0.0)
        if share_s:
            gain.record(0, replica(nothing, share_s, base=rollout))
    assert trained[0]
    assert 2 <= sum(trained) <= 8, "a fifth of a tenth of the time at most"
    assert any(trained[20:])


def test_a_drafter_that_rises_is_trained_on_and_pays_more_in_longer_rollouts():
    gain = DrafterGain()
    for rollout in range(10):
        gain.begin_rollout()
        share_s = gain.share_s(ROLLOUT_S)
        assert share_s == pytest.approx(0.1 * ROLLOUT_S)
        gain.record(0, replica(0.1, share_s, base=rollout))
    assert gain.share_s(1.0) == 0.0, "a second of rollouts is not worth it"
