"""Suggestions for mistyped names."""

import pytest

from longtail.system.files import meant


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smolm2", " (is smollm2 meant?)"),
        ("runs/quickstrat", " (is runs/quickstart meant?)"),
        ("runs/else", ""),
        ("nowhere/at/all", ""),
        ("x" * 5000, ""),
        ("", ""),
    ],
)
def test_the_nearest_name_or_folder_is_meant(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstarts.txt").touch()
    assert meant(name, ("smollm2",)) == expected
