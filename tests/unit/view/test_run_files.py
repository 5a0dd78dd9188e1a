"""Data of a page from the files of a run: whole, damaged, growing and long ones."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longtail.errors import ConfigError
from longtail.view import lines
from longtail.view.run_files import RunFiles, open_runs
from longtail.view.series import MOST_POINTS, MetricSeries
from longtail.view.speculation import read_rollout
from longtail.view.texts import read_lengths, read_rows
from longtail.view.timeline import read_timeline
from support.synthetic_run import FILES, append_steps, metrics_row, speculation_row


@pytest.fixture
def run(tmp_path: Path) -> Path:
    append_steps(tmp_path / "run", 1, 3)
    return tmp_path / "run"


def everything(directory: Path) -> dict[str, Any]:
    """All that a page can ask about the first steps of a run."""
    files = RunFiles(directory, "run")
    found = {
        "describe": files.describe(),
        "overview": files.overview(),
        "zoomed": files.overview(2, 3),
        "steps": [files.step(step) for step in (1, 2, 3, 4)],
        "timeline": files.timeline(2, (1.0, 2.0)),
        "rollouts": [files.rollouts(step) for step in (1, 2, 3)],
        "texts": [files.rollout(2, index) for index in (-1, 0, 3, 9)],
        "stamp": files.stamp(),
    }
    json.dumps(found, allow_nan=False).encode()  # all of it can be sent
    return found


def test_a_page_gets_the_runs_own_numbers(run: Path) -> None:
    found = everything(run)
    columns = found["overview"]["columns"]
    assert columns["step"] == [1, 2, 3]
    for name, value in metrics_row(2).items():
        if name in columns and value is not None:
            assert columns[name][1] == pytest.approx(value, rel=1e-6), name
    assert columns["timing_s/other"] == pytest.approx([0.42, 0.42, 0.42])
    assert found["overview"]["held_out"] == [[0, 0.25]]
    step = found["steps"][1]
    assert step["lengths"]["max"] == 80
    assert sum(step["lengths"]["counts"]) == step["lengths"]["num"] == 4
    assert step["timeline"]["spans"][0] == [0, "generating", 0, 6]
    assert step["timeline"]["end_s"] == 10
    assert step["timeline"]["marks"] == [[1, 5.5, "drafter v2 offered"]]
    assert step["decisions"][0]["what"] == "published"
    assert step["metrics"]["reward/mean"] == pytest.approx(metrics_row(2)["reward/mean"], rel=1e-6)
    text = found["texts"][1]
    assert text["prompt"] == "What is 2 + 0?"
    assert text["drafted"] == [0, 4, 6, 6]
    assert found["texts"][2]["drafted"] == []
    assert found["texts"][0] is None
    assert found["texts"][3] is None


def test_a_rollout_is_joined_in_slices_with_its_totals(run: Path) -> None:
    speculation = RunFiles(run, "run").step(2)["speculation"]
    row = speculation_row(2)
    rollout = speculation["rollout"]
    assert [line["worker"] for line in speculation["lines"]] == [1, 0]
    assert speculation["chosen"] == 1  # the slowest worker writes last
    assert rollout["running"] == row["running"]
    assert rollout["accept_length"] == [None] * 20 + [3] * 40
    assert rollout["mean_accept_length"] == 3
    assert rollout["plain_time_share"] == pytest.approx(1 / 3)
    assert rollout["switches"] == [[2, True, row["switches"][0][2], 40]]


def test_drafted_characters_that_do_not_fit_the_text_are_left_out(run: Path) -> None:
    name = "task/2/0#0"
    for places in ([0], [4, 2], [0, 9999], [0, "x"], {"0": 4}, None):
        row = {"step": 2, "drafted": {name: places}}
        (run / "drafts.jsonl").write_text(json.dumps(row) + "\n")
        assert RunFiles(run, "run").rollout(2, 0)["drafted"] is None
    (run / "drafts.jsonl").unlink()
    assert RunFiles(run, "run").rollout(2, 0)["drafted"] is None


def test_a_summary_adds_the_last_held_out_reward(run: Path) -> None:
    (run / "summary.json").write_text('{"steps": 3, "reward_after": 0.75, "seconds": 30.5}')
    files = RunFiles(run, "run")
    assert files.describe()["state"] == "finished"
    assert files.overview()["held_out"] == [[0, 0.25], [3, 0.75]]


READERS: dict[str, Callable[[Path, int], object]] = {
    "trace.json": read_timeline,
    "rollouts.jsonl": lambda run, step: (read_rows(run, step), read_lengths(run, step)),
    "speculation.jsonl": read_rollout,
}


@pytest.mark.parametrize("name", READERS)
def test_a_log_cut_at_every_byte_gives_what_its_whole_lines_give(tmp_path: Path, name: str) -> None:
    """Not only a torn end is left out: no earlier line changes."""
    append_steps(tmp_path, 1, 2, size=3)
    whole = (tmp_path / name).read_bytes()
    read = READERS[name]
    expected: object = None
    for end in range(len(whole) + 1):
        (tmp_path / name).write_bytes(whole[:end])
        found = read(tmp_path, 2)
        if end == 0 or whole[end - 1 : end] == b"\n":  # a line has become whole
            expected = found
        assert found == expected


def test_metrics_cut_at_every_byte_lose_no_earlier_step(run: Path) -> None:
    whole = (run / "metrics.jsonl").read_bytes()
    start = whole.rfind(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        (run / "metrics.jsonl").write_bytes(whole[:end])
        series = MetricSeries(run)
        series.update()
        assert list(series.steps) == [1, 2]


@pytest.mark.parametrize("name", [*FILES, "config.toml"])
def test_a_file_cut_anywhere_never_breaks_the_page(run: Path, name: str) -> None:
    whole = (run / name).read_bytes()
    for end in range(0, len(whole), len(whole) // 8):
        (run / name).write_bytes(whole[:end])
        everything(run)


@pytest.mark.parametrize("seed", range(20))
def test_damaged_bytes_never_break_the_page(run: Path, seed: int) -> None:
    draws = random.Random(seed)
    for name in (*FILES, "config.toml"):
        damaged = bytearray((run / name).read_bytes())
        for _ in range(draws.choice((1, 5, 60))):
            place = draws.randrange(len(damaged))
            damaged[place : place + draws.choice((0, 1, 1, 9))] = draws.choice(
                (
                    b"",
                    b"\n",
                    b"9" * 400,
                    b"1e999",
                    b"-1",
                    b"null",
                    b"[[",
                    b"\xff",
                    b'"',
                    b"NaN",
                    b"{",
                )
            )
        (run / name).write_bytes(damaged)
    everything(run)


@pytest.mark.parametrize(
    "row",
    [
        {"step": 4, "seconds": [2, 1]}, {"step": 4, "kind": "training"}, {"step": 1e300},
        {"step": -1}, {"step": True}, {"step": 4, "reward/mean": "0.5", "text": 7},
        {"step": 4, "num_tokens": -5, "prompt_id": None, "text": "\ud83d"},
        {"step": 4, "reward/mean": 10**400}, {"step": 4, "switches": [[0], [None, 1, 2]]},
    ],
)  # fmt: skip
def test_a_row_of_other_kinds_of_values_is_left_out(run: Path, row: dict[str, Any]) -> None:
    for name in FILES:
        with (run / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
    everything(run)


def test_files_that_are_missing_or_folders_are_left_out(run: Path) -> None:
    for name in FILES:
        (run / name).unlink()
        everything(run)
        (run / name).mkdir()
        everything(run)


def test_a_large_log_is_announced_until_all_of_it_is_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunFiles(run, "r").overview()
    line = max(map(len, (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)))
    monkeypatch.setattr(lines, "_MOST_BYTES", line)
    files, stamp = RunFiles(run, "r"), ""
    assert files.overview()["num_steps"] < whole["num_steps"]
    while stamp != files.stamp():
        stamp = files.stamp()
        overview = files.overview()
    assert overview == whole


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_files_without_an_end_are_left_out(run: Path, kind: str) -> None:
    for path in [each for each in run.iterdir() if each.is_file()]:
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    files = RunFiles(run, "r")
    assert files.describe()["step"] == 0
    assert files.overview()["num_steps"] == 0
    assert files.step(1)["timeline"] is None
    assert files.rollouts(1)["rows"] == []


def test_a_run_is_followed_as_it_grows_and_is_cut_back(run: Path) -> None:
    files = RunFiles(run, "run")
    assert files.overview()["last"] == 3
    stamp = files.stamp()
    append_steps(run, 4, 5)
    assert files.stamp() != stamp
    assert files.overview()["columns"]["step"] == [1, 2, 3, 4, 5]
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "new").write_bytes(b"".join(lines[:2]))
    (run / "new").replace(run / "metrics.jsonl")  # as a resumed run does
    assert files.overview()["columns"]["step"] == [1, 2]


def test_the_data_of_a_page_is_bounded_whatever_the_number_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sizes = []
    for steps in (500, 2000):
        path.write_text("".join(json.dumps(metrics_row(s)) + "\n" for s in range(1, steps + 1)))
        series = MetricSeries(tmp_path)
        series.update()
        extract = series.extract()
        assert len(extract["columns"]["step"]) <= MOST_POINTS
        assert extract["columns"]["step"][-1] == steps
        sizes.append(len(json.dumps(extract)))
    assert max(sizes) < 150_000
    close = series.extract(1000, 1199)["columns"]  # a closer look has every step again
    assert close["step"] == list(range(1000, 1200))


def test_points_stay_where_they_are_while_a_run_grows(tmp_path: Path) -> None:
    rows = [json.dumps(metrics_row(step)) + "\n" for step in range(1, 1200)]
    series = MetricSeries(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(rows[:1000]))
    series.update()
    before = series.extract()["columns"]["reward/mean"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(rows[1000:1100])
    series.update()
    after = series.extract()["columns"]["reward/mean"]
    assert after[: len(before) - 1] == before[:-1]


def test_many_spans_of_workers_are_joined_until_one_looks_closer(tmp_path: Path) -> None:
    with (tmp_path / "trace.json").open("w") as file:
        file.write("[\n")
        for index in range(9000):
            event = {
                "name": ("idle", "learning")[index % 2], "ph": "X", "ts": 1000.0 * index,
                "dur": 1000.0, "pid": 0, "tid": 0, "args": {"step": 1},
            }  # fmt: skip
            file.write(json.dumps(event) + ",\n")
    files = RunFiles(tmp_path, "run")
    timeline = files.step(1)["timeline"]
    assert timeline["is_joined"]
    assert len(timeline["spans"]) <= 4000
    closer = files.timeline(1, (1.0, 2.0))
    assert closer is not None
    assert not closer["is_joined"]
    assert len(closer["spans"]) == 1002


def test_directories_without_a_run_are_refused_and_names_differ(tmp_path: Path) -> None:
    for place in ("a/run", "b/run"):
        append_steps(tmp_path / place, 1, 1)
    runs = open_runs([str(tmp_path / "a/run"), str(tmp_path / "b/run")])
    assert [run.name for run in runs] == ["a/run", "b/run"]
    again = open_runs([str(tmp_path / "a/run"), str(tmp_path / "a/run")])
    assert len({run.name for run in again}) == 2
    with pytest.raises(ConfigError, match="no run has written there"):
        open_runs([str(tmp_path / "nowhere")])
