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


NO_GAIN = {
    "README.md": "no gain yet",
    "docs/start.md": "does not pay yet",
    "docs/comparison.md": "gains nothing",
    "docs/benchmarks.md": "gains nothing on this run yet",
}
"""Words about SmolLM2-135M that must go when its card shows a gain."""


@pytest.mark.parametrize("page", NO_GAIN)
def test_a_page_denies_a_gain_of_smollm2_exactly_while_its_card_has_none(page: str) -> None:
    speedup = Claim(card="e2e_smollm2_cold", path="step_speedup.cold.median", pages=()).value
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert (NO_GAIN[page] in text) is (speedup < 1.02), f"{page}: a step is {speedup:.2f}x as fast"


def test_the_readme_fits_ninety_lines_and_has_one_picture() -> None:
    assert len(README.splitlines()) <= 90
    assert README.count("![") == 1


def test_the_page_of_benchmarks_links_every_card() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    cards = {path.stem for path in (ROOT / "benchmarks").glob("*.json")}
    assert cards == {
        stem for stem in cards if re.search(rf"\.\./benchmarks/{stem}\.(txt|json)\)", page)
    }


def test_each_cell_of_the_comparison_has_a_source() -> None:
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    tables, _, sources = page.partition("## Sources")
    rows = [line.strip("|").split("|") for line in tables.splitlines() if line.count("|") == 9]
    cells = [(row[0], cell.strip()) for row in rows for cell in row[1:] if row[0].strip(" -")]
    unsourced = [(row, cell) for row, cell in cells if "](" not in cell and "][" not in cell]
    assert {cell for _, cell in unsourced} <= {"-"}
    for number in set(re.findall(r"\]\[(\d+)\]", tables)):
        assert f"\n[{number}]: https://" in sources
        assert re.search(rf"\[{number}\] \| .* \| .*20\d\d \|", sources), f"no date of {number}"


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
