import html
from html.parser import HTMLParser
from pathlib import Path

import pytest

from longtail.cli import main as cli
from longtail.engine.report import Switch
from longtail.engine.rollout_log import LoggedRollout, RolloutSeries
from longtail.errors import ConfigError
from longtail.report import page as run_report
from longtail.report.page import report_if_possible, write_report
from longtail.run.metrics import JsonLines
from longtail.run.summary import read_metrics, summarize_run
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.cost_file import save_costs

EVIL = "<script>alert('x')</script> & <b>\"bold\"</b>"
VOID = {"meta", "img", "path", "polyline", "!doctype"}


def _series(steps: int = 6, reason: str = EVIL, switches: int = 2) -> RolloutSeries:
    return RolloutSeries(
        seconds=tuple(0.5 * (index + 1) for index in range(steps)),
        running=(4,) * steps,
        drafts=(0,) * (steps // 2) + (4,) * (steps - steps // 2),
        nodes=(12,) * steps,
        accepted=(4,) * steps,
        readings=((0.5,),) * steps,
        switches=tuple((i, Switch(drafts=bool(i % 2), reason=reason)) for i in range(switches)),
    )


def _run(directory: Path, *, finished: bool = True, series: RolloutSeries | None = None) -> Path:
    """Write the directory of a run with rollouts of steps 1 and 2."""
    directory.mkdir(parents=True)
    rollouts = JsonLines(directory / "speculation.jsonl")
    metrics = JsonLines(directory / "metrics.jsonl")
    for step in (1, 2):
        logged = LoggedRollout(step=step, series=series or _series(steps=6 * step))
        rollouts.write(step, logged.as_json())
        reward = float("nan") if step == 1 else 0.5
        metrics.write(step, {"reward/mean": reward, "timing_s/rollout": 3.0 / step})
    rollouts.close()
    metrics.close()
    if finished:
        rows = read_metrics(directory / "metrics.jsonl")
        summary = summarize_run(rows, steps=2, reward_after=0.5, seconds=9.0, warm_start_s=0.0)
        summary.write(directory / "summary.json")
        costs = CostModel(TimeCurve((1, 64), (0.001, 0.01)), pair_s=1e-6, node_pair_s=1e-7)
        costs.drafts = [DraftCost(start_s=1e-3, request_s=0.0, level_s=1e-3, row_s=1e-4)]
        save_costs(directory / "cost.json", costs)
    return directory


class _Page(HTMLParser):
    """Parser of a page: its tags, which must be balanced, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [value or "" for _, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _no_picture(*_: object, **__: object) -> None:
    raise ConfigError("plots need matplotlib: pip install <it>")


@pytest.mark.slow
def test_a_report_is_one_page_with_all_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run")
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr() == (f"{run / 'report.html'}\n", "")
    assert (run / "rollout.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run.glob(".new-*"))
    text = (run / "report.html").read_text()
    page = _Page(text)
    said = " ".join(page.texts)
    for words in (
        "held-out reward", "Rollout of step 2: up to 4 requests", "12 engine steps, 6.0 s",
        "decoded plainly for 50% of the time and switched 2 times.", "drafting", "drafter 1",
        "0.500 in step 2", "verifies drafts",
        "rollout time: 3.0 s in step 1, 1.5 s in step 2",
    ):  # fmt: skip
        assert words in said, words
    assert any(value.startswith("data:image/png;base64,") for value in page.attributes)
    assert "http" not in text  # nothing is fetched from anywhere


def test_texts_of_a_run_are_escaped_in_html(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_report, "draw", _no_picture)
    run = _run(tmp_path / '<img src=x> & "run"')
    text = write_report(run, log=lambda _: None).read_text()
    page = _Page(text)
    assert "script" not in page.tags
    assert "b" not in page.tags
    assert "img" not in page.tags
    assert EVIL in page.texts
    assert html.escape(run.name) in text


@pytest.mark.slow
def test_a_report_shows_the_rollout_of_a_chosen_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run")
    assert cli.main(["report", str(run), "--step", "1"]) == 0
    assert "Rollout of step 1" in (run / "report.html").read_text()
    assert cli.main(["report", str(run), "--step=3"]) == 2
    assert "has steps 1 to 2" in capsys.readouterr().err


def test_a_run_without_speculation_is_refused_with_the_missing_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'speculation.jsonl'}: " in said
    assert "speculation.drafter" in said
    assert not list(tmp_path.iterdir())


def test_a_page_without_matplotlib_has_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_report, "draw", _no_picture)
    run = _run(tmp_path / "run", series=_series(switches=0))
    assert cli.main(["report", str(run)]) == 0
    assert "pip install <it>" in capsys.readouterr().err
    said = " ".join(_Page((run / "report.html").read_text()).texts)
    assert "There is no plot: " in said
    assert "for 50% of the time and never switched" in said


@pytest.mark.slow
def test_the_page_of_an_unfinished_run_states_what_is_missing(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", finished=False)
    (run / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n7\n{"step": 2, "rewa')
    said = " ".join(_Page(write_report(run, log=lambda _: None).read_text()).texts)
    assert "There is no summary yet" in said
    assert "No costs were measured" in said
    assert "mean reward: 0.500 in step 1" in said
    (run / "cost.json").write_text("rubbish")
    said = " ".join(_Page(write_report(run, log=lambda _: None).read_text()).texts)
    assert "damaged, or not a cost model" in said


@pytest.mark.slow
def test_the_table_lists_the_last_fifty_switches(tmp_path: Path) -> None:
    run = _run(tmp_path / "run", series=_series(steps=60, switches=60, reason="why it was"))
    page = _Page(write_report(run, log=lambda _: None).read_text())
    assert page.texts.count("why it was") == 50
    assert "switched 60 times. The table lists the last 50" in " ".join(page.texts)


def test_a_failing_report_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    report_if_possible(tmp_path, said.append)  # the run did not speculate
    assert said == []
    run = _run(tmp_path / "run")
    (run / "report.html").mkdir()
    report_if_possible(run, said.append)
    assert said[0].startswith("no report: ")
    assert (run / "rollout.png").exists()
    monkeypatch.setattr(run_report, "find_spec", lambda _: None)
    report_if_possible(run, said.append)  # the summary has the command
    assert len(said) == 1
