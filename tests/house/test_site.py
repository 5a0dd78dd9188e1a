"""The pages as a site."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.tree import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built site."""
    pytest.importorskip("material", reason="the extra docs")
    place = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place / "site")],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    yield place / "site"
    shutil.rmtree(place)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    source = r"<(?:script|img|iframe)[^>]*src=\"([^\"]+)"
    sheet = r"<link[^>]*rel=\"stylesheet\"[^>]*href=\"([^\"]+)"
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        for found in re.findall(f"{source}|{sheet}", page.read_text(encoding="utf-8")):
            assert not re.match(r"https?:|//", "".join(found)), f"{page.name}: {found}"


@pytest.mark.slow
def test_the_site_has_a_page_for_each_page_of_docs_and_every_card_that_they_link(
    site: Path,
) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists(), page
    assert (site / "repository" / "benchmarks" / "e2e_quickstart.txt").exists()


def test_every_page_of_docs_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = set(re.findall(r": (\S+\.md)", navigation))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {each for each in named if not each.startswith("repository/")} == {*pages, "index.md"}
