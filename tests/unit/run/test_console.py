import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from longtail.engine.report import StepReport, Switch, Verified
from longtail.engine.rollout_log import RolloutLog
from longtail.run.console import Console
from longtail.run.summary import summarize_run

METRICS = {
    "reward/mean": 0.4137,
    "response_length/p50": 96.0,
    "response_length/max": 1024.0,
    "rollout/tail_idle_share": 0.61,
    "rollout/tokens_per_s": 12345.6,
    "timing_s/rollout": 6.21,
    "timing_s/step": 8.0,
}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _report(num_running: int) -> StepReport:
    return StepReport(
        num_tokens=num_running,
        num_running=num_running,
        step_s=0.1,
        forward_s=0.1,
        sample_s=0.0,
        emitted=(),
        finished=(),
    )


def test_a_step_is_one_line_on_any_terminal_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    Console().step(7, 100, METRICS)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "step   7/100  reward 0.414  length p50 96 max 1024  tail idle 61%  12,346 tokens/s  "
        "rollout 6.2 s of 8.0 s\n"
    )


def test_the_line_of_a_step_counts_ungraded_completions(capsys: pytest.CaptureFixture[str]) -> None:
    Console().step(1, 1, {**METRICS, "reward/failures": 3.0})
    assert capsys.readouterr().err.endswith("8.0 s  3 ungraded\n")


def test_a_logged_line_is_printed_verbatim(capsys: pytest.CaptureFixture[str]) -> None:
    said = "reward module:function:smile: in runs/[bold]x[/bold] " + "long " * 50
    Console().log(said)
    assert capsys.readouterr().err == said + "\n"


def test_without_a_terminal_there_is_no_live_line(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console.begin_rollout("step 1", 4)
    console.rollout_step(_report(4))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_a_live_line_and_clears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console()
    console.begin_rollout("step 1", 4)
    for _ in range(100):  # without a pause: drawn once
        console.rollout_step(_report(3))
    assert terminal.getvalue() == "\r\x1b[2Kstep 1: 0/4 done, 3 running, 0 tokens/s"
    console.log("done")
    assert terminal.getvalue().endswith("tokens/s\r\x1b[2Kdone\n")


def test_the_summary_keeps_paths_whole_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summarize_run([], steps=0, reward_after=None, seconds=1.0, warm_start_s=0.0)
    run = Path("/somewhere") / ("deep/" * 15) / "[red]" / "run"
    Console().summary(summary, run)
    out, err = capsys.readouterr()
    assert err == ""
    assert f" {run / 'metrics.jsonl'} " in out
    assert "held-out reward" in out


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        ((), ""),
        ((Switch(drafts=True, reason=""),), "  drafting at the end"),
        (
            (
                Switch(drafts=True, reason="it pays"),
                Switch(drafts=False, reason="predicted 0.93x of plain decoding at 64 running"),
            ),
            "  plain at the end (2 switches): predicted 0.93x of plain decoding at 64 running",
        ),
    ],
)
def test_the_line_of_a_step_ends_with_its_last_switch(
    capsys: pytest.CaptureFixture[str], switches: tuple[Switch, ...], said: str
) -> None:
    log = RolloutLog()
    for switch in (*switches, None):
        log.add(replace(_report(4), readings=(0.1,), switch=switch))
    Console().step(1, 1, METRICS, log.series())
    assert capsys.readouterr().err.endswith(f"8.0 s{said}\n")


@pytest.mark.parametrize(("num_drafts", "word"), [(0, "plain"), (1, "drafting")])
def test_the_live_line_shows_whether_the_engine_drafts(
    monkeypatch: pytest.MonkeyPatch, num_drafts: int, word: str
) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    console = Console()
    console.begin_rollout("step 1", 4)
    verified = Verified(request_id="a", position=0, num_drafted=3, depth=3, num_accepted=1)
    console.rollout_step(replace(_report(3), readings=(0.1,), verified=(verified,) * num_drafts))
    assert terminal.getvalue().endswith(f"3 running, {word}, 0 tokens/s")
