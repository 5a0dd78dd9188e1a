"""What a rollout leaves of its steps: sums, and a line of the log."""

import pytest

from longtail.engine.report import RolloutMeter
from longtail.engine.rollout_log import EVALUATION, RolloutLog
from longtail.generator import StepReport, Switch, Verified

ON = Switch(drafts=True, reason='predicted 1.21x of "plain" decoding at 8 running')
OFF = Switch(drafts=False, reason="")


def report(num_running: int, *drafts: tuple[int, int], step_s: float = 0.25, **more: object):
    verified = tuple(
        Verified(request_id="a", position=0, num_drafted=nodes, depth=1, num_accepted=accepted)
        for nodes, accepted in drafts
    )
    usual = {"num_tokens": 10, "forward_s": step_s / 2, "sample_s": step_s / 4, "speculates": True}
    return StepReport(
        num_running=num_running,
        step_s=step_s,
        emitted=(),
        finished=(),
        verified=verified,
        **usual | more,
    )


def test_an_engine_without_speculation_logs_nothing() -> None:
    log = RolloutLog()
    log.add(report(8, speculates=False))
    assert log.series() is None


def test_the_line_of_a_rollout_has_its_columns() -> None:
    log = RolloutLog()
    for step in (report(8), report(8, (6, 2), (3, 3), switch=ON), report(2, switch=OFF)):
        log.add(step)
    series = log.series()
    assert series is not None
    assert series.line(EVALUATION, 1) == {
        "kind": "evaluation",
        "worker": 1,
        "seconds": [0.25, 0.5, 0.75],
        "running": [8, 8, 2],
        "drafts": [0, 2, 0],
        "nodes": [0, 9, 0],
        "accepted": [0, 5, 0],
        "switches": [[1, True, ON.reason], [2, False, ""]],
    }


def test_the_meter_adds_steps_up():
    meter = RolloutMeter()
    for num_running, step_s in ((4, 1.0), (2, 2.0), (2, 3.0)):
        meter.add(report(num_running, step_s=step_s))
    found = meter.report()
    assert (found.seconds, found.num_steps, found.num_computed) == (6.0, 3, 30)
    assert found.bookkeeping_share == pytest.approx(0.25)
    # Four places for 6 s; taken: 4 for 1 s, 2 for 5 s.
    assert found.tail_idle_share == pytest.approx(1 - 14 / 24)
    assert RolloutMeter().report().tokens_per_s == 0.0
