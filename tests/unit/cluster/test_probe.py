"""The log lines about a drafter at the start of a run."""

import math

import pytest

from longtail.cluster.drafter.payoff import Probe


def probed(accept_len: float, before: float | None) -> Probe:
    return Probe(
        accept_len=accept_len, trained_accept_len=before, trained_on="base", num_tokens=512
    )


@pytest.mark.parametrize(
    ("accept_len", "before", "pays"),
    [(4.0, 4.0, False), (3.81, 4.0, False), (3.79, 4.0, True), (1.0, None, False)],
)
def test_training_would_pay_if_more_than_a_twentieth_is_lost(accept_len, before, pays):
    found = probed(accept_len, before)
    assert found.would_pay is pays
    assert len(found.lines("spot")) == 1 + pays


def test_the_warning_names_the_remedy_for_this_run():
    lost = probed(2.0, 4.0)
    assert "set spot.train = spot" in lost.lines("never")[1]
    assert "it is trained while workers idle" in lost.lines("spot")[1]
    assert "after each rollout" in lost.lines("serial")[1]
    assert (
        "2.00 on 512 tokens of this policy, 4.00 where it was trained (base)"
        in (lost.lines("spot")[0])
    )


def test_an_unmeasured_drafter_has_no_log_line():
    assert probed(math.nan, 4.0).lines("spot") == []
    assert not probed(math.nan, 4.0).would_pay
    assert "trained" not in probed(2.0, None).lines("spot")[0]
