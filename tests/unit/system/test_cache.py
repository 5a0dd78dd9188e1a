"""The user's cache: entries are built once, whole, and this user's, or refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longtail.errors import ConfigError, LongtailError
from longtail.system.cache import build_once, cache_directory


def _library(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "library.so").write_bytes(b"code")
    (folder / "sub" / "more").write_bytes(b"more")


def _refuse(folder: Path) -> None:
    raise AssertionError("it was there already")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "deep" / "cache"))
    return tmp_path / "deep" / "cache"


def test_the_environment_sets_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.setenv("LONGTAIL_CACHE", "~/there")
    assert cache_directory() == Path.home() / "there"
    monkeypatch.setenv("LONGTAIL_CACHE", "")  # empty is unset
    assert cache_directory() == tmp_path / "xdg" / "longtail"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_directory() == Path.home() / ".cache" / "longtail"


def test_an_entry_is_announced_and_built_once_and_only_its_user_can_write_to_it(root, caplog):
    entry = build_once("kernels", "1f", _library, announce="compiling, once")
    assert build_once("kernels", "1f", _refuse, announce="compiling, once") == entry
    assert caplog.messages == ["compiling, once"]
    assert (entry / "library.so").read_bytes() == b"code"
    for folder in (root, root / "kernels"):
        assert folder.stat().st_mode & 0o777 == 0o700
    root.chmod(0o777)
    build_once("kernels", "1f", _refuse)
    assert root.stat().st_mode & 0o777 == 0o755


def test_an_entry_with_a_damaged_or_missing_file_is_built_anew(root, caplog):
    library = build_once("kernels", "1f", _library) / "library.so"
    for damage in (lambda: library.write_bytes(b"co"), library.unlink):
        damage()
        build_once("kernels", "1f", _library)
        assert library.read_bytes() == b"code"
        assert "it is built anew" in caplog.messages.pop()
        caplog.clear()
    assert [path.name for path in (root / "kernels").iterdir()] == ["1f"]


@pytest.mark.parametrize("place", ["", "kernels", "kernels/1f", "kernels/1f/library.so"])
def test_files_of_another_user_are_refused(monkeypatch, root, place):
    build_once("kernels", "1f", _library)
    real, foreign = Path.stat, root / place

    def stat(path: Path, **words: bool) -> os.stat_result:
        found = list(real(path, **words))
        return os.stat_result([*found[:4], found[4] + (path == foreign), *found[5:]])

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigError, match=r"belongs to another user.*LONGTAIL_CACHE") as caught:
        build_once("kernels", "1f", _refuse)
    assert str(foreign) in str(caught.value)


def test_the_error_of_an_unwritable_cache_names_the_remedy(root):
    root.parent.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*set LONGTAIL_CACHE"):
        build_once("kernels", "1f", _library)


def test_a_failed_build_leaves_nothing_and_raises_its_own_error(root):
    def fail(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").write_bytes(b"half")
        raise LongtailError("no data")

    with pytest.raises(LongtailError, match="no data"):
        build_once("kernels", "1f", fail)
    assert list((root / "kernels").iterdir()) == []


_BUILDER = """
import sys
from longtail.system.cache import build_once

def build(path):
    print("building", flush=True)
    sys.stdin.readline()
    path.mkdir()

print(build_once("kernels", "1f", build), flush=True)
"""


def test_a_process_waits_for_another_that_builds_the_same_entry(root):
    command = [sys.executable, "-c", _BUILDER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as first:
        assert first.stdout.readline() == "building\n"
        with subprocess.Popen(command, text=True, **pipes) as second:
            assert "waiting for another process" in second.stderr.readline()
            first.stdin.write("\n")
            first.stdin.flush()
            assert first.stdout.readline() == second.stdout.readline()
            second.communicate()
        first.communicate()
    assert [path.name for path in (root / "kernels").iterdir()] == ["1f"]
