"""Numbers and pictures of pages come from the cards in benchmarks/."""

import re
import sys
from pathlib import Path

import pytest

from house.claims import CLAIMS, ROWS, Claim
from house.tree import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def _pages(claim: Claim) -> list[str]:
    """Pages on which the number is not stated."""
    texts = {page: " ".join((ROOT / page).read_text("utf-8").split()) for page in claim.pages}
    return [page for page, text in texts.items() if claim.text not in text]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim.card}:{claim.path}")
def test_a_page_states_what_the_card_holds(claim: Claim) -> None:
    place = f"benchmarks/{claim.card}.json, {claim.path}"
    assert not _pages(claim), f"must state {claim.text!r}, which is in {place}"


def test_each_row_of_the_readmes_results_is_the_number_of_the_card_that_it_links() -> None:
    table = README.partition("## Results")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if "](benchmarks/" in line]
    assert len(rows) == len(ROWS) <= 5
    for row, claim in zip(rows, ROWS, strict=True):
        assert f"](benchmarks/{claim.card}.json)" in row, row
        assert f"| {claim.text} |" in row, f"README.md must state {claim.text!r} in: {row}"


def test_each_ratio_in_the_readme_is_that_of_a_card() -> None:
    known = " ".join(claim.text for claim in CLAIMS if "README.md" in claim.pages)
    stated = re.findall(r"\d+\.\d+x(?: \(\d+\.\d+-\d+\.\d+\))?", README)
    assert stated
    assert not [ratio for ratio in stated if ratio not in known]


def test_the_readme_fits_ninety_lines_and_has_one_picture() -> None:
    assert len(README.splitlines()) <= 90
    assert README.count("![") == 1


def _labels(picture: Path) -> list[str]:
    """Texts of a picture in matplotlib's SVG, which keeps each as a comment."""
    return re.findall(r"<!-- (.*?) -->", picture.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_pictures_are_those_that_the_cards_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "figures", raising=False)
    import figures

    committed = ROOT / "docs" / "img"
    drawn = {path.name for path in committed.glob("*.svg")}
    assert set(figures.FIGURES) <= drawn
    for name, draw in figures.FIGURES.items():
        draw(tmp_path / name)
        assert _labels(tmp_path / name) == _labels(committed / name), f"{name}: `make figures`"
