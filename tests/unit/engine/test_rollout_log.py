import json
from dataclasses import replace
from pathlib import Path

from longtail.engine.rollout_log import (
    EVALUATION,
    LoggedRollout,
    RolloutLog,
    RolloutSeries,
)
from longtail.generator import StepReport, Switch, Verified
from longtail.run.metrics import JsonLines

ON = Switch(drafts=True, reason='predicted 1.21x of "plain" decoding at 8 running')
OFF = Switch(drafts=False, reason="")


def _report(num_running: int, *drafts: tuple[int, int], **more: object) -> StepReport:
    verified = tuple(
        Verified(request_id="a", position=0, num_drafted=nodes, depth=1, num_accepted=accepted)
        for nodes, accepted in drafts
    )
    report = StepReport(
        num_tokens=num_running,
        num_running=num_running,
        step_s=0.25,
        forward_s=0.1,
        sample_s=0.0,
        emitted=(),
        finished=(),
        verified=verified,
        speculates=True,
    )
    return replace(report, **more)


def _series(*reports: StepReport) -> RolloutSeries:
    log = RolloutLog()
    for report in reports:
        log.add(report)
    series = log.series()
    assert series is not None
    return series


WORKED = _series(
    _report(8),
    _report(8, (6, 2), (3, 3), switch=ON),
    _report(2, switch=OFF),
)


def test_an_engine_without_speculation_logs_nothing() -> None:
    log = RolloutLog()
    log.add(_report(8, speculates=False))
    assert log.series() is None


def test_the_line_of_a_rollout_has_its_columns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "speculation.jsonl")
    lines.write(7, LoggedRollout(step=7, series=WORKED, kind=EVALUATION, worker=1).as_json())
    lines.close()
    assert json.loads((tmp_path / "speculation.jsonl").read_text()) == {
        "step": 7,
        "kind": "evaluation",
        "worker": 1,
        "seconds": [0.25, 0.5, 0.75],
        "running": [8, 8, 2],
        "drafts": [0, 2, 0],
        "nodes": [0, 9, 0],
        "accepted": [0, 5, 0],
        "switches": [[1, True, ON.reason], [2, False, ""]],
    }
