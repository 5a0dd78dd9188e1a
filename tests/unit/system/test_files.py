"""Suggestions for mistyped names, and the process of a run."""

import fcntl
import os
from pathlib import Path

import pytest

from longtail.errors import did_you_mean
from longtail.system.files import process_of, similar_folders


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smolm2", " (did you mean smollm2?)"),
        ("runs/quickstrat", " (did you mean runs/quickstart?)"),
        ("runs/else", ""),
        ("nowhere/at/all", ""),
        ("x" * 5000, ""),
        ("", ""),
    ],
)
def test_the_nearest_name_or_folder_is_suggested(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstarts.txt").touch()
    assert did_you_mean(name, ["smollm2", *similar_folders(name)]) == expected


def test_the_process_of_a_run_is_found_by_its_lock(tmp_path: Path):
    assert process_of(tmp_path) is None
    (tmp_path / ".lock").touch()
    assert process_of(tmp_path) is None
    with open(tmp_path / ".lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        assert process_of(tmp_path) == os.getpid()
