import pytest

from longtail.errors import CheckpointError
from longtail.run.checkpoint import Checkpoint
from longtail.run.summary import (
    Summary,
    finished_summary,
    summarize_run,
    summary_lines,
    write_summary,
)


def _row(**changes: float | None) -> dict[str, float | None]:
    return {
        "response_length/p50": 10.0, "response_length/max": 80.0,
        "response_length/max_over_median": 8.0, "rollout/generated_tokens": 300.0,
        "rollout/tail_idle_share": 0.5, "timing_s/rollout": 6.0, "timing_s/reward": 1.0,
        "timing_s/learn": 2.0, "timing_s/step": 10.0, **changes,
    }  # fmt: skip


LAST = {
    "rollout/generated_tokens": 100.0, "rollout/tail_idle_share": 0.25, "timing_s/rollout": 2.0,
    "timing_s/step": 6.0, "response_length/max": 200.0, "response_length/max_over_median": 20.0,
}  # fmt: skip
ROWS = [_row(**{"eval/reward_mean": 0.25}), _row(**LAST)]


def _summary(rows: list[dict[str, float | None]] = ROWS) -> Summary:
    return summarize_run(rows, steps=len(rows), reward_after=0.5, seconds=30.0)


def test_shares_of_a_summary_are_weighted_by_time():
    assert _summary() == {
        "reward_before": 0.25,  # from the first row
        "reward_after": 0.5,
        "seconds": 30.0,
        "steps": 2,
        "tokens_per_s": 400 / 8,
        "rollout_share": 8 / 16,
        "reward_share": 2 / 16,
        "learn_share": 4 / 16,
        "other_share": pytest.approx(2 / 16),
        "tail_idle_share": (0.5 * 6 + 0.25 * 2) / 8,
        "length_p50": 10.0,
        "length_max": 200.0,
        "max_over_median": 14.0,
        "accept_length": None,
        "emitted_share": None,
        "limit": "",
        "num_switches": None,
        "tuner_share": None,
        "idle_utilization": None,
        "drafter_accept_lengths": [],
    }


def test_metrics_that_are_null_or_missing_count_as_zero():
    assert _summary([_row(**{"rollout/tail_idle_share": None})])["tail_idle_share"] == 0.0
    nothing = _summary([])
    assert nothing["reward_before"] is None
    assert nothing["tokens_per_s"] == nothing["rollout_share"] == nothing["other_share"] == 0


def test_a_run_is_finished_if_its_last_checkpoint_has_its_summary(tmp_path):
    summary = _summary()
    checkpoint = Checkpoint(step=2, path=tmp_path, state={})
    assert finished_summary(tmp_path, checkpoint, 2) is None  # no summary
    write_summary(tmp_path, summary | {"steps": 1})
    assert finished_summary(tmp_path, checkpoint, 2) is None  # of a shorter run
    write_summary(tmp_path, summary)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert finished_summary(tmp_path, checkpoint, 3) is None  # more steps are requested
    assert finished_summary(tmp_path, None, 2) is None
    assert finished_summary(tmp_path, checkpoint, 2) == summary
    with pytest.raises(CheckpointError, match=r"the summary cannot be written to"):
        write_summary(tmp_path / "nowhere", summary)


def test_the_lines_list_rewards_costs_and_files(tmp_path):
    lines = dict(summary_lines(_summary(), tmp_path))
    assert lines["held-out reward"] == "0.250 before, 0.500 after 2 steps"
    assert lines["rollout speed"] == "50 tokens/s"
    assert lines["time of a step"] == "rollout 50%, reward 12%, learn 25%, other 12%"
    assert lines["lost to the tail"] == "44% of the rollout's slots were empty"
    assert lines["policy"] == str(tmp_path / "checkpoints" / "step_000002" / "policy")
    assert lines["report"] == str(tmp_path / "report.html")
    assert not lines.keys() & {"speculation", "tuner", "idle workers", "drafter"}
    unknown = summary_lines(_summary() | {"reward_before": None}, tmp_path)
    assert "held-out reward" not in dict(unknown)


def test_the_lines_list_what_was_drafted(tmp_path):
    plain = {"speculation/switches": 1.0, "speculation/tuner_share": 0.002}
    drafted = {
        "speculation/switches": 3.0,
        "speculation/tuner_share": 0.01,
        "speculation/accept_length": 2.5,
        "speculation/emitted_share": 0.75,
    }
    summary = _summary([_row(**plain), _row(**drafted, **{"timing_s/rollout": 2.0})])
    assert summary["tuner_share"] == pytest.approx((0.002 * 6 + 0.01 * 2) / 8)  # by time
    lines = dict(summary_lines(summary, tmp_path))
    text = "2.50 tokens per verify step; verify steps produced 75% of all tokens"
    assert (lines["speculation"], lines["tuner"]) == (text, "4 switches, 0.4% of the time")
    assert not summary["drafter_accept_lengths"], "no drafter has learned"
    learning = _row(**drafted, **{"drafter/version": 1.0})
    assert _summary([learning, learning])["drafter_accept_lengths"] == [2.5, 2.5]
    lengths = [1 + 0.1 * n for n in range(31)]
    learned = dict(summary_lines(summary | {"drafter_accept_lengths": lengths}, tmp_path))
    shown = learned["drafter"].partition(": ")[2].split()
    assert len(shown) <= 12
    assert shown[-1] == "4.00"
