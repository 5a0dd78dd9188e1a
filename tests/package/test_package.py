"""The wheel and the source distribution hold what they must.

`make smoke` installs the wheel (smoke.py), which takes too long for the suite.
"""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import longtail

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "longtail"
LEFT_BEHIND = ("runs", "build", "dist", "site")
"""Folders of a checkout that are not part of it, beside those with a dot."""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions, built from a copy of the checkout without network."""
    place = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, place / "copy", ignore=_left_behind)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(place / "dist")],
        cwd=place / "copy",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return place / "dist"


def _left_behind(folder: str, names: list[str]) -> list[str]:
    if Path(folder) != ROOT:
        return [name for name in names if name == "__pycache__" or name.endswith(".egg-info")]
    kept = (".ci", ".dockerignore", ".pre-commit-config.yaml")
    hidden = [name for name in names if name.startswith(".") and name not in kept]
    return [*hidden, *(name for name in names if name in LEFT_BEHIND)]


def files_under(folder: Path) -> Iterator[str]:
    """Paths, relative to the checkout, of the files of a folder, without what Python caches."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(ROOT).as_posix()


@pytest.mark.slow
def test_the_wheel_holds_the_package_with_version_licence_and_commands(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    info = f"longtail-{longtail.__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"{info}/METADATA").decode()
        commands = archive.read(f"{info}/entry_points.txt").decode()
        licence = archive.read(f"{info}/licenses/LICENSE").decode()
    package = {name for name in names if not name.partition("/")[0].endswith(".dist-info")}
    assert package == {path.removeprefix("src/") for path in files_under(PACKAGE)}
    assert {"longtail/py.typed", "longtail/model/kernels/cpu/kernels.c"} <= package
    assert f"\nVersion: {longtail.__version__}\n" in metadata
    assert "\nProject-URL: " in metadata
    assert "longtail = longtail.cli.main:main" in commands
    assert "[vllm.general_plugins]" in commands
    assert licence == (ROOT / "LICENSE").read_text()


@pytest.mark.slow
def test_the_source_distribution_holds_what_its_tests_read(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("src/longtail", "tests", "docs", "examples", "benchmarks"):
        missing = set(files_under(ROOT / folder)) - names
        assert not missing, folder
    root = {path.name for path in ROOT.iterdir() if path.is_file()}
    unneeded = {".git", ".gitignore"}
    untracked = {name for name in root if name.startswith(".coverage")}
    assert root - unneeded - untracked <= names
    assert ".ci/run" in names


def test_the_version_is_stated_once_and_named_where_readers_look() -> None:
    version = longtail.__version__
    assert '\ndynamic = ["version"]\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text()
