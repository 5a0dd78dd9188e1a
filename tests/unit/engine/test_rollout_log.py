"""What a rollout leaves of its steps."""

import pytest

from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.generator import StepReport


def report(num_running: int, *, step_s: float = 0.25, speculates: bool = True) -> StepReport:
    return StepReport(
        num_tokens=10,
        num_running=num_running,
        step_s=step_s,
        forward_s=step_s / 2,
        sample_s=step_s / 4,
        emitted=(),
        finished=(),
        speculates=speculates,
    )


def test_an_engine_without_speculation_logs_nothing() -> None:
    series = RolloutSeries()
    series.add(report(8, speculates=False))
    assert series == RolloutSeries()


def test_a_report_adds_steps_up():
    found = RolloutReport()
    for num_running, step_s in ((4, 1.0), (2, 2.0), (2, 3.0)):
        found.add(report(num_running, step_s=step_s))
    assert (found.seconds, found.num_steps, found.num_computed) == (6.0, 3, 30)
    assert found.bookkeeping_share == pytest.approx(0.25)
    # Four places for 6 s; taken: 4 for 1 s, 2 for 5 s.
    assert found.tail_idle_share == pytest.approx(1 - 14 / 24)
    assert RolloutReport().tokens_per_s == 0.0
