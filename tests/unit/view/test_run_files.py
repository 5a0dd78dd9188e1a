"""Data of a page from the files of a run: whole, half-written, growing and long ones."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.errors import ConfigError
from longtail.view import series
from longtail.view.run_files import RunFiles, open_runs
from longtail.view.series import lines_of_step
from longtail.view.steps import MOST_SLICES, MOST_SPANS, speculation
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
        "steps": [files.step(step) for step in (1, 2, 3, 4)],
        "rollouts": [files.rollouts(step) for step in (1, 2, 3)],
        "completions": [files.completions(step) for step in (1, 2, 3)],
        "texts": [files.texts(step) for step in (1, 2, 3)],
    }
    json.dumps(found, allow_nan=False)  # all of it can be sent
    return found


def test_a_page_gets_the_runs_own_numbers(run):
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
    assert [row["num_tokens"] for row in found["completions"][1]["rows"]] == [10, 20, 40, 80]
    first, second = found["texts"][1][:2]
    assert first["prompt"] == "What is 2 + 0?"
    assert (first["drafted"], second["drafted"]) == ([0, 4, 6, 6], [])
    assert (first["turns"], found["texts"][1][2]["turns"]) == (
        [],
        [[0, 6, "assistant", 0.5], [8, 20, "tool", None], [20, 37, "assistant", 0]],
    )
    (run / "drafts.jsonl").unlink()
    assert RunFiles(run, "run").texts(2)[0]["drafted"] is None


def test_a_rollout_is_joined_in_slices_with_its_totals(run):
    files, row = RunFiles(run, "run"), speculation_row(2)
    rollout = files.rollouts(2)[1]
    assert [line["worker"] for line in files.step(2)["rollouts"]] == [1, 0]
    assert rollout["running"] == row["running"]
    assert rollout["accept_length"] == [None] * 20 + [3] * 40
    assert rollout["mean_accept_length"] == 3
    assert rollout["plain_time_share"] == pytest.approx(1 / 3)
    assert rollout["switches"] == [[2, True, row["switches"][0][2], 40]]
    long = speculation(speculation_row(2, num=5000))
    assert len(long["seconds"]) == MOST_SLICES
    assert long["plain_time_share"] == pytest.approx(20 / 5000)


def test_a_summary_adds_the_last_held_out_reward(run):
    (run / "summary.json").write_text('{"steps": 3, "reward_after": 0.75, "seconds": 30.5}')
    files = RunFiles(run, "run")
    assert files.describe()["state"] == "finished"
    assert files.overview()["held_out"] == [[0, 0.25], [3, 0.75]]


@pytest.mark.parametrize("name", FILES)
def test_a_half_written_last_line_is_left_out(run, name):
    whole = everything(run)
    with (run / name).open() as file:
        last = file.readlines()[-1]
    for end in range(1, len(last), max(len(last) // 6, 1)):
        with (run / name).open("r+") as file:
            file.seek(0, os.SEEK_END)
            size = file.tell()
            file.write(last[:end])
        assert everything(run) == whole
        os.truncate(run / name, size)


def test_files_that_are_missing_are_left_out(run):
    for path in [each for each in run.iterdir() if each.is_file()]:
        path.unlink()
    found = everything(run)
    assert found["describe"]["step"] == 0
    assert found["overview"]["columns"]["step"] == []
    assert found["steps"][0]["timeline"] is None
    assert found["texts"][0] == []


def test_a_run_is_followed_as_it_grows_and_is_cut_back(run):
    files, path = RunFiles(run, "run"), run / "metrics.jsonl"
    assert files.steps == [1, 2, 3]
    stamp = files.stamp()
    append_steps(run, 4, 5)
    assert files.stamp() != stamp
    assert files.overview()["columns"]["step"] == [1, 2, 3, 4, 5]
    lines = path.read_bytes().splitlines(keepends=True)
    (run / "new").write_bytes(b"".join(lines[:2]))
    (run / "new").replace(path)  # as a resumed run does
    assert files.steps == [1, 2]
    path.unlink()
    assert files.steps == []
    path.write_bytes(lines[0])
    assert files.steps == [1]


def test_of_many_spans_the_longest_are_shown(tmp_path):
    events = [
        {
            "name": "idle", "ph": "X", "ts": 1000.0 * index, "dur": 100.0 + index % 2, "pid": 0,
            "tid": 0, "args": {"step": 1},
        }
        for index in range(2 * MOST_SPANS)
    ]  # fmt: skip
    lines = [json.dumps(event) + ",\n" for event in events]
    (tmp_path / "trace.json").write_text("".join(["[\n", *lines]))
    spans = RunFiles(tmp_path, "run").step(1)["timeline"]["spans"]
    assert [span[2] for span in spans] == [(2 * n + 1) / 1000 for n in range(MOST_SPANS)]


def test_directories_without_a_run_are_refused_and_names_differ(tmp_path):
    for place in ("a/run", "b/run"):
        append_steps(tmp_path / place, 1, 1)
    runs = open_runs([str(tmp_path / "a/run"), str(tmp_path / "b/run")])
    assert [run.name for run in runs] == ["1: run", "2: run"]
    with pytest.raises(ConfigError, match="no run has written there"):
        open_runs([str(tmp_path / "nowhere")])


def _read(path: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line.rstrip(b",\n")) for line in lines_of_step(path, step)]


def test_the_lines_of_every_step_are_found_without_an_index(tmp_path):
    path = tmp_path / "log"

    @given(
        counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90)), max_size=12),
        torn=st.integers(0, 40),
        is_trace=st.booleans(),
    )
    def law(counts: list[tuple[int, int]], torn: int, is_trace: bool) -> None:
        rows = [
            {"x": "x" * size, "args": {"step": step}} if is_trace else {"step": step, "x": size}
            for step, (count, size) in enumerate(counts, 1)
            for _ in range(count)
        ]
        written = [json.dumps(row) + (",\n" if is_trace else "\n") for row in rows]
        half = json.dumps({"step": len(counts) + 1, "x": "half-written"})[:torn]
        path.write_text("".join([*(["[\n"] if is_trace else []), *written, half]))
        for step in range(len(counts) + 3):
            expected = [row for row in rows if (row.get("args") or row)["step"] == step]
            assert _read(path, step) == expected

    law()


def test_a_step_and_a_line_are_read_up_to_a_bound(tmp_path, monkeypatch):
    path = tmp_path / "log"
    rows = [json.dumps({"step": 1, "n": n}) + "\n" for n in range(9)]
    path.write_text("".join(rows))
    monkeypatch.setattr(series, "MOST_BYTES", 3 * len(rows[0]))
    assert [row["n"] for row in _read(path, 1)] == [0, 1, 2]
    path.write_bytes(b'{"step": 1, "x": "' + b"x" * 1000 + b'"}\n')
    assert _read(path, 1) == []
