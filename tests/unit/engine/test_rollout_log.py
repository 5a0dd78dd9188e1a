import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.engine.report import StepReport, Switch, Verified
from longtail.engine.rollout_log import (
    EVALUATION,
    LoggedRollout,
    RolloutLog,
    RolloutSeries,
    accept_lengths,
    read_rollout,
)
from longtail.errors import ConfigError
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


def test_a_rollout_is_kept_in_columns_an_entry_a_step() -> None:
    assert WORKED.seconds == (0.25, 0.5, 0.75)
    assert WORKED.running == (8, 8, 2)
    assert (WORKED.drafts, WORKED.nodes, WORKED.accepted) == ((0, 2, 0), (0, 9, 0), (0, 5, 0))
    assert WORKED.switches == ((1, ON), (2, OFF))
    assert [WORKED.begin_of(index) for index in range(3)] == [0.0, 0.25, 0.5]
    assert WORKED.mean_nodes == 3.0
    assert accept_lengths(WORKED) == [1.0, 3.5, 1.0]


def test_an_engine_without_speculation_logs_nothing() -> None:
    log = RolloutLog()
    log.add(_report(8, speculates=False))
    assert log.series() is None


def test_a_log_comes_back_from_its_file_to_the_last_bit(tmp_path: Path) -> None:
    chance = random.Random(0)
    reports = [
        _report(
            chance.randrange(1, 99),
            *[(4, chance.randrange(5))] * chance.randrange(3),
            step_s=chance.random(),
            switch=ON if chance.random() < 0.1 else None,
        )
        for _ in range(300)
    ]
    series = _series(*reports)
    lines = JsonLines(tmp_path / "speculation.jsonl")
    lines.write(7, LoggedRollout(step=7, series=series).as_json())
    lines.close()
    logged = read_rollout(tmp_path / "speculation.jsonl")
    assert (logged.step, logged.series) == (7, series)


@pytest.mark.parametrize(
    "damage",
    [
        {"drafts": [0.1]},
        {"nodes": None},
        {"switches": [[3, True, "beyond"]]},
        {"switches": [[0]]},
        {"seconds": ["soon", 1, 2]},
    ],
)
def test_a_line_that_is_no_rollout_is_refused(damage: dict[str, object]) -> None:
    row = {**WORKED.as_json(), **damage}
    with pytest.raises((KeyError, TypeError, ValueError)):
        RolloutSeries.of_json(row)


def test_the_last_rollout_is_read_unless_a_step_is_named(tmp_path: Path) -> None:
    path = tmp_path / "speculation.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 10):
        series = replace(WORKED, running=(step, step, step))
        lines.write(step, LoggedRollout(step=step, series=series).as_json())
        evaluation = LoggedRollout(step=step, series=WORKED, kind=EVALUATION)
        lines.write(step, evaluation.as_json())
    lines.close()
    assert [read_rollout(path, step).series.running[0] for step in (None, 1, 10)] == [10, 1, 10]
    with path.open("a") as file:
        file.write('{"step": 11, "kind": "training", "seconds": [0.1')  # being written, or torn
    assert read_rollout(path).step == 10


def test_a_rollout_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "speculation.jsonl"
    with pytest.raises(ConfigError, match=r"speculation\.jsonl: .*; runs with speculation\.draft"):
        read_rollout(path)
    path.touch()
    with pytest.raises(ConfigError, match="no step is in it yet"):
        read_rollout(path)
    line = {"step": 2, "kind": "training", "seconds": []}
    path.write_text(json.dumps(line) + "\n" + json.dumps({"step": 3}) + "\nrubbish\n")
    with pytest.raises(ConfigError, match=r"--step 9: .* has steps 2 to 2"):
        read_rollout(path, 9)
    with pytest.raises(ConfigError, match="the line of step 2 is damaged"):
        read_rollout(path)
