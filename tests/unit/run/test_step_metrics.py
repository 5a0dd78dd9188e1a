from dataclasses import replace

import pytest

from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import RolloutSeries
from longtail.run.step_metrics import rollout_metrics
from longtail.system.stopwatch import Stopwatch
from longtail.types import Completion
from support.rollouts import completion, step_report

REPORT = RolloutReport(
    **{"seconds": 2.0, "engine_s": 2.0, "forward_s": 1.0, "sample_s": 0.5, "running_s": 6.0},
    **{"num_steps": 10, "num_generated": 40, "num_computed": 50, "max_running": 4},
)


def _completion(length: int) -> Completion:
    return completion(f"p@0#{length}", (1,) * length)


def test_waiting_for_another_engine_is_not_bookkeeping() -> None:
    half = replace(REPORT, seconds=1.0, engine_s=1.0, forward_s=0.5, sample_s=0.25, running_s=3.0)
    both = merge_reports([REPORT, half], seconds=2.0)
    assert both.engine_s == 1.5
    assert both.bookkeeping_share == 0.25 == REPORT.bookkeeping_share == half.bookkeeping_share
    assert both.tail_idle_share == 1 - 9.0 / (8 * 2.0)


def test_metrics_of_drafting_exist_only_for_steps_that_drafted() -> None:
    completions = [_completion(40)]
    drafted = replace(
        REPORT, num_drafted=60, num_accepted=15, num_verified=10, draft_s=0.5, draft_forward_s=0.25
    )
    metrics, plain = (rollout_metrics(report, completions) for report in (drafted, REPORT))
    assert {name: metrics[name] for name in metrics.keys() - plain.keys()} == {
        "speculation/accept_length": 2.5,
        "speculation/accepted_share": 0.25,
        "speculation/emitted_share": 25 / 40,
        "speculation/draft_share": 0.25,
    }
    later = replace(drafted, num_accepted_later=3, num_verified_later=2)
    added = rollout_metrics(later, completions).items() - metrics.items()
    assert added == {("speculation/accept_length_later_turns", 2.5)}
    # The drafter's own passes are no bookkeeping.
    assert metrics["rollout/bookkeeping_share"] == plain["rollout/bookkeeping_share"] - 0.125


def test_an_engine_without_speculation_logs_nothing() -> None:
    series = RolloutSeries()
    series.add(step_report(8, speculates=False))
    assert series == RolloutSeries()


def test_a_report_adds_steps_up():
    found = RolloutReport()
    for num_running, step_s in ((4, 1.0), (2, 2.0), (2, 3.0)):
        found.add(step_report(num_running, step_s=step_s))
    assert (found.seconds, found.num_steps, found.num_computed) == (6.0, 3, 30)
    assert found.bookkeeping_share == pytest.approx(0.25)
    # Four places for 6 s; taken: 4 for 1 s, 2 for 5 s.
    assert found.tail_idle_share == pytest.approx(1 - 14 / 24)
    assert RolloutReport().tokens_per_s == 0.0


def test_a_stopwatch_sums_sections_and_restarts_with_each_lap() -> None:
    now = iter([0.0, 1.0, 3.0, 4.0, 4.5, 10.0, 11.0])
    watch = Stopwatch(lambda: next(now))
    with watch.section("rollout"):
        pass
    with pytest.raises(KeyError), watch.section("rollout"):
        raise KeyError
    assert watch.lap() == {"rollout": 2.5, "step": 10.0}
    assert watch.lap() == {"step": 1.0}
