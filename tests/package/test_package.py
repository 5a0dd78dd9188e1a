"""The wheel and the source distribution hold what they must.

`make smoke` builds both, runs these tests, and installs the wheel (smoke.py).
"""

import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import longtail

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "longtail"
DIST = ROOT / os.environ.get("LONGTAIL_DIST", "")
built = pytest.mark.skipif("LONGTAIL_DIST" not in os.environ, reason="make smoke")


def files_under(folder: Path) -> Iterator[str]:
    """Paths, relative to the checkout, of the files of a folder, without what Python caches."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(ROOT).as_posix()


@built
def test_the_wheel_holds_the_package_with_version_licence_and_commands() -> None:
    (wheel,) = DIST.glob("*.whl")
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


@built
def test_the_source_distribution_holds_what_its_tests_read() -> None:
    (sdist,) = DIST.glob("*.tar.gz")
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
