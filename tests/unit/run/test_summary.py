import json
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.errors import CheckpointError
from longtail.run import summary as summary_module
from longtail.run.checkpoint import Checkpoint
from longtail.run.summary import RunSummary, finished_summary, read_metrics, summarize_run


def _row(**changes: float | None) -> dict[str, float | None]:
    return {
        "response_length/p50": 10.0,
        "response_length/max": 80.0,
        "response_length/max_over_median": 8.0,
        "rollout/generated_tokens": 300.0,
        "rollout/tail_idle_share": 0.5,
        "timing_s/rollout": 6.0,
        "timing_s/reward": 1.0,
        "timing_s/logprob": 0.5,
        "timing_s/update": 1.5,
        "timing_s/step": 10.0,
        **changes,
    }


ROWS = [
    _row(**{"eval/reward_mean": 0.25}),
    _row(
        **{
            "eval/reward_mean": 0.75,
            "rollout/generated_tokens": 100.0,
            "rollout/tail_idle_share": 0.25,
            "timing_s/rollout": 2.0,
            "timing_s/step": 6.0,
            "response_length/max": 200.0,
            "response_length/max_over_median": 20.0,
        }
    ),
]


def _summary(rows: list[dict[str, float | None]] = ROWS) -> RunSummary:
    return summarize_run(rows, steps=len(rows), reward_after=0.5, seconds=30.0, warm_start_s=12.0)


def test_shares_of_a_summary_are_weighted_by_time() -> None:
    summary = _summary()
    assert summary.reward_before == 0.25  # from the first row
    assert summary.reward_after == 0.5
    assert summary.tokens_per_s == 400 / 8
    assert summary.rollout_share == 8 / 16
    assert summary.reward_share == 2 / 16
    assert summary.logprob_share == 1 / 16
    assert summary.update_share == 3 / 16
    assert summary.other_share == pytest.approx(2 / 16)
    assert summary.tail_idle_share == (0.5 * 6 + 0.25 * 2) / 8
    assert (summary.length_p50, summary.length_max, summary.max_over_median) == (10.0, 200.0, 14.0)


def test_a_run_without_metrics_has_a_summary_of_zeros() -> None:
    summary = _summary([])
    assert summary.reward_before is None
    assert (
        summary.rollout_share
        == summary.tail_idle_share
        == summary.other_share
        == summary.length_max
        == 0
    )


def test_a_null_metric_counts_as_zero() -> None:
    assert _summary([_row(**{"rollout/tail_idle_share": None})]).tail_idle_share == 0.0


def test_a_summary_is_read_back_from_its_file(tmp_path: Path) -> None:
    summary = _summary()
    summary.write(tmp_path / "summary.json")
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    text = (tmp_path / "summary.json").read_text()
    assert json.loads(text)["reward_before"] == 0.25
    checkpoint = Checkpoint(step=2, path=tmp_path, state={})
    assert finished_summary(tmp_path, checkpoint, 2) == summary


def test_a_run_is_finished_if_its_last_checkpoint_has_its_summary(tmp_path: Path) -> None:
    summary = _summary()
    checkpoint = Checkpoint(step=2, path=tmp_path, state={})
    assert finished_summary(tmp_path, checkpoint, 2) is None  # no summary
    (tmp_path / "summary.json").write_text('{"steps": 2')
    assert finished_summary(tmp_path, checkpoint, 2) is None  # torn
    (tmp_path / "summary.json").write_text('{"steps": 2}')
    assert finished_summary(tmp_path, checkpoint, 2) is None  # of another version
    replace(summary, steps=1).write(tmp_path / "summary.json")
    assert finished_summary(tmp_path, checkpoint, 2) is None  # of a shorter run
    summary.write(tmp_path / "summary.json")
    assert finished_summary(tmp_path, checkpoint, 3) is None  # more steps are requested
    assert finished_summary(tmp_path, None, 2) is None
    assert finished_summary(tmp_path, checkpoint, 1) == summary


def test_an_error_in_writing_a_summary_states_that_nothing_else_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"summary\.json: .*; .* only the summary is missing"):
        _summary().write(tmp_path / "nowhere" / "summary.json")


def test_metrics_are_read_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "reward/mean": null}\n{"step": 2, "reward/mean": 0.5}\n')
    assert read_metrics(path) == [
        {"step": 1, "reward/mean": None},
        {"step": 2, "reward/mean": 0.5},
    ]


def test_the_lines_list_rewards_costs_and_files(tmp_path: Path) -> None:
    lines = dict(_summary().lines(tmp_path))
    assert lines["held-out reward"] == "0.250 before, 0.500 after 2 steps"
    assert lines["time"] == "30 s (12 s of it to open model and drafter)"
    assert lines["rollout speed"] == "50 tokens/s"
    assert lines["time of a step"] == "rollout 50%, reward 12%, logprob 6%, update 19%, other 12%"
    assert lines["lost to the tail"] == "44% of the rollout's slots were empty"
    assert lines["policy"] == str(tmp_path / "checkpoints" / "step_000002" / "policy")
    unknown = dict(replace(_summary(), reward_before=None, warm_start_s=0.0).lines(tmp_path))
    assert unknown["held-out reward"] == "not measured before, 0.500 after 2 steps"
    assert unknown["time"] == "30 s"


def test_speculation_is_one_line_of_the_summary(tmp_path: Path) -> None:
    assert "speculation" not in dict(_summary().lines(tmp_path))
    assert "drafter" not in dict(_summary().lines(tmp_path))
    learned = replace(_summary(), drafter_accept_lengths=tuple(1 + 0.1 * n for n in range(31)))
    shown = dict(learned.lines(tmp_path))["drafter"].split()
    assert len(shown) == len(["expected", "accept", "length", "by", "step:"]) + 12
    assert (shown[-12], shown[-1]) == ("1.00", "4.00")
    plain = {"speculation/switches": 1.0, "speculation/tuner_share": 0.002}
    drafted = {
        "speculation/switches": 3.0,
        "speculation/tuner_share": 0.01,
        "speculation/accept_length": 2.5,
        "speculation/emitted_share": 0.75,
    }
    rows = [_row(**plain), _row(**drafted, **{"timing_s/rollout": 2.0})]
    summary = _summary(rows)
    assert summary.num_switches == 4
    assert summary.tuner_share == pytest.approx((0.002 * 6 + 0.01 * 2) / 8)  # by time
    assert dict(summary.lines(tmp_path))["speculation"] == (
        "2.50 tokens per verify step; verify steps produced 75% of all tokens; 4 switches, "
        "tuner 0.4% of the time"
    )
    only = dict(_summary(rows[:1]).lines(tmp_path))
    assert only["speculation"] == "1 switch, tuner 0.2% of the time"


def test_the_summary_lists_the_report_or_the_command_that_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    assert "report" not in dict(_summary().lines(run))  # the run did not speculate
    (run / "speculation.jsonl").touch()
    command = f"longtail report '{run}'"
    monkeypatch.setattr(summary_module, "find_spec", lambda _: "there")
    assert dict(_summary().lines(run))["report"] == f"not written; run: {command}"
    monkeypatch.setattr(summary_module, "find_spec", lambda _: None)
    assert dict(_summary().lines(run))["report"].endswith(f"[plots]' && {command}")
    (run / "report.html").touch()
    assert dict(_summary().lines(run))["report"] == str(run / "report.html")
