"""The page in Chromium: each panel shows the run's own numbers, follows it, and can be operated.

The report is the same page as one file.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from longtail.view import report
from longtail.view.report import write_report
from longtail.view.run_files import open_runs
from support.http_threads import viewing
from support.synthetic_run import append_steps, metrics_row, rollout_rows, speculation_row

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
Page = Any
NAME = "<img src=x onerror=alert(1)>"
_WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
"""
_WITHOUT_TABLE = "details.numbers:not([hidden]):not(:has(table))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Page]]:
    """Open the page of runs; at the end, nothing may have been reported as wrong."""
    closers: list[Callable[[], object]] = []
    wrong: list[str] = []
    pages: list[Page] = []

    def opened(
        *runs: Path,
        width: int = 1200,
        dark: bool = False,
        waits: bool = True,
        as_report: bool = False,
    ) -> Page:
        serving = nullcontext(write_report(runs[0]).as_uri()) if as_report else served(runs)
        url = serving.__enter__()
        scheme = "dark" if dark else "light"
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, offline=as_report
        )
        context.add_init_script(_WATCH)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(url)
        if waits:
            page.wait_for_selector("body[data-step]")
        pages.append(page)
        closers.extend((context.close, lambda: serving.__exit__(None, None, None)))
        return page

    yield opened
    violations = [violation for page in pages for violation in page.evaluate("violations")]
    for close in closers:
        close()
    assert not wrong
    assert not violations


def served(runs: Sequence[Path]) -> AbstractContextManager[str]:
    return viewing(open_runs([str(run) for run in runs]))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of six steps; its name and its texts have HTML in them."""
    append_steps(tmp_path / NAME, 1, 6)
    return tmp_path / NAME


def numbers(page: Page, panel: str) -> list[dict[str, str]]:
    """Rows of a panel's table of numbers, opened with the keyboard."""
    details = page.locator(f"#{panel} > details.numbers")
    if details.get_attribute("open") is None:
        details.locator("summary").press("Enter")
    return details.locator("table").first.evaluate(
        """(table) => {
          const heads = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent);
          return [...table.querySelectorAll("tbody tr")].map((row) =>
            Object.fromEntries([...row.cells].map((cell, at) => [heads[at], cell.textContent])));
        }"""
    )


def value(shown: str) -> float | None:
    """The number in a cell; None where nothing is known."""
    found = re.match(r"[\d,.]+", shown)
    return float(found[0].replace(",", "")) if found else None


def near(expected: float | None) -> object:
    return None if expected is None else pytest.approx(expected, rel=0.006)


PANELS = {
    "panel-reward": {"train": "reward/mean"},
    "panel-accept": {
        "measured": "speculation/accept_length", "expected": "drafter/expected_accept_length",
    },
    "panel-lengths": {
        "longest": "response_length/max", "p99": "response_length/p99",
        "p90": "response_length/p90", "median": "response_length/p50",
    },
    "panel-speed": {"tokens/s": "rollout/tokens_per_s"},
    "panel-phases": {
        "rollout, s": "timing_s/rollout", "learn, s": "timing_s/learn",
        "reward, s": "timing_s/reward",
        "publish, s": "timing_s/publish", "drafter, s": "timing_s/drafter",
    },
    "panel-idle": {"trained the drafter, s": "cluster/spot_s", "idle, s": "cluster/idle_s"},
}  # fmt: skip


def test_each_panel_shows_the_runs_own_numbers(open_page, run):
    page = open_page(run)
    for panel, columns in PANELS.items():
        rows = [row for row in numbers(page, panel) if row["step"] != "0"]
        assert [row["step"] for row in rows] == list("123456"), panel
        for step, row in enumerate(rows, start=1):
            for column, metric in columns.items():
                assert value(row[column]) == near(metrics_row(step)[metric]), (panel, column)
    assert value(numbers(page, "panel-reward")[0]["held-out"]) == near(0.25)
    assert "trained the drafter" in page.locator("#panel-idle .readout").inner_text()
    assert "80" in page.locator(".run").inner_text()
    assert page.locator(".run h2").inner_text() == NAME
    canvases = page.locator("#by-step canvas").evaluate_all("(all) => all.map((c) => c.width)")
    assert len(canvases) == 6
    assert min(canvases) > 300


def test_the_panels_of_a_step_show_its_own_numbers(open_page, run):
    page = open_page(run)
    bars = page.locator("#panel-timeline rect")
    classes = bars.evaluate_all("(all) => all.map((bar) => bar.getAttribute('class'))")
    assert sorted(classes) == sorted([*["generating", "learning"] * 2, "spot", "idle"])
    widths = dict(
        zip(classes, bars.evaluate_all("(a) => a.map((b) => b.width.baseVal.value)"), strict=True)
    )
    assert widths["spot"] / widths["idle"] == pytest.approx(19, rel=0.02)
    totals = page.locator("#panel-timeline .readout").inner_text()
    assert "trains the drafter 1.90" in totals
    assert "drafter v6 offered" in page.locator("#panel-timeline svg").text_content()
    rows = numbers(page, "panel-rollout")
    row = speculation_row(6)
    assert [value(each["running"]) for each in rows] == row["running"]
    assert [value(each["drafted tokens"]) for each in rows] == row["nodes"]
    assert [value(each["accept length"]) for each in rows] == [None] * 20 + [3.0] * 40
    assert row["switches"][0][2] in page.locator("#switches").text_content()
    lengths = [
        int(value(each["completions"]) or 0) for each in numbers(page, "panel-lengths-of-step")
    ]
    assert sum(lengths) == 4
    assert "published" in page.locator("#panel-decisions").inner_text()
    metrics = {each["metric"]: value(each["value"]) for each in numbers(page, "panel-metrics")}
    assert metrics["timing_s/learn"] == near(metrics_row(6)["timing_s/learn"])
    page.select_option("#rollout-line", label="worker 1")
    sync_api.expect(page.locator("#rollout-line")).to_have_value("0")


def test_rollouts_are_read_as_text_in_any_order(open_page, run):
    page = open_page(run)
    rows = rollout_rows(6)
    expected = rows[0]["text"]
    completion = page.locator("pre.completion")
    sync_api.expect(completion).to_have_text(expected)
    assert page.locator("pre b").count() == 0
    assert page.locator("pre.prompt").inner_text() == rows[0]["prompt"]
    assert page.locator("pre mark").all_inner_texts() == ["step"]
    page.locator("#rows").focus()
    page.keyboard.press("ArrowDown")
    sync_api.expect(completion).to_have_text(rows[1]["text"])
    page.select_option("#order", "long")
    sync_api.expect(completion).to_have_text(rows[3]["text"])
    assert page.locator("#rows .option .tokens").all_inner_texts()[0].startswith("80")
    page.locator("#rows").focus()
    page.keyboard.press("ArrowDown")  # an episode
    sync_api.expect(page.locator("pre.observation")).to_have_text("completion 2")
    heads = ["assistant, reward 0.50", "tool", "assistant, reward 0"]
    assert page.locator("#text h4").all_inner_texts() == heads


def test_the_page_follows_a_run_that_grows(open_page, tmp_path):
    run = tmp_path / "young"
    run.mkdir()
    (run / "config.toml").write_text("[run]\nsteps = 9\n")
    page = open_page(run, waits=False)
    sync_api.expect(page.locator("#zoom")).to_contain_text("No step is in metrics.jsonl yet")
    append_steps(run, 1, 2)
    page.wait_for_selector("body[data-step='2']")
    append_steps(run, 3, 3)
    page.wait_for_selector("body[data-step='3']")
    assert [row["step"] for row in numbers(page, "panel-speed")] == ["1", "2", "3"]
    assert "step 3 of 9" in page.locator(".run").inner_text()
    page.locator("#previous").click()  # another step is chosen, and the page stays there
    page.wait_for_selector("body[data-step='2']")
    append_steps(run, 4, 4)
    page.wait_for_selector("body[data-steps='4']")
    assert page.locator("body").get_attribute("data-step") == "2"
    assert [row["step"] for row in numbers(page, "panel-speed")] == ["1", "2", "3", "4"]


def test_the_keyboard_chooses_steps_and_zooms(open_page, run):
    page = open_page(run)
    plot = page.locator("#panel-reward .plot")
    plot.focus()
    for key, step in (("ArrowLeft", 5), ("Home", 1), ("ArrowRight", 2), ("End", 6)):
        page.keyboard.press(key)
        page.wait_for_selector(f"body[data-step='{step}']")
        assert plot.get_attribute("aria-valuenow") == str(step)
        assert f"step {step}:" in (plot.get_attribute("aria-valuetext") or "")
    page.keyboard.press("+")
    sync_api.expect(page.locator("#zoom")).to_contain_text("press 0 to see all")
    page.keyboard.press("0")
    sync_api.expect(page.locator("#zoom")).to_have_text("")
    timeline = page.locator("#panel-timeline .plot")
    first = timeline.locator("rect").first.evaluate("(bar) => bar.width.baseVal.value")
    timeline.focus()
    for _ in range(3):
        page.keyboard.press("+")
    assert timeline.locator("rect").count() == 2  # seconds 4.4 to 5.6: one worker waits
    page.keyboard.press("0")
    assert timeline.locator("rect").first.evaluate("(b) => b.width.baseVal.value") == first
    page.locator("#step-number").fill("3")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-step='3']")


def test_a_narrow_dark_screen_shows_every_panel(open_page, run):
    page = open_page(run, width=390, dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for panel in (*PANELS, "panel-timeline", "panel-rollout", "panel-lengths-of-step"):
        box = page.locator(f"#{panel}").bounding_box()
        assert box["x"] >= 0, panel
        assert box["x"] + box["width"] <= 390, panel
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in re.findall(r"\d+", paper)) < 60


def test_two_runs_stand_over_each_other(open_page, tmp_path):
    for name, steps in (("off", 5), ("on", 4)):
        append_steps(tmp_path / name, 1, steps)
    page = open_page(tmp_path / "off", tmp_path / "on")
    rows = numbers(page, "panel-accept")
    assert len(rows) == 5
    measured = metrics_row(4)["speculation/accept_length"]
    assert value(rows[3]["off: measured"]) == value(rows[3]["on: measured"]) == near(measured)
    assert value(rows[4]["on: measured"]) is None
    sync_api.expect(page.locator("#panel-timeline .readout")).to_contain_text("on has no such step")
    page.locator("#previous").click()
    page.wait_for_selector("body[data-step='4']")
    totals = page.locator("#panel-timeline .readout")
    sync_api.expect(totals).to_contain_text("as fast as off")
    assert page.locator("#panel-timeline rect").count() == 12
    page.get_by_role("radio", name="on", exact=True).check()
    sync_api.expect(page.locator("#panel-metrics .readout")).to_contain_text("of on")


def test_the_report_shows_what_the_page_shows(open_page, run):
    """Every table and text of two steps, read after the run's own files are gone."""
    shown = {}
    for is_report in (False, True):
        page = open_page(run, as_report=is_report)
        if is_report:
            requests: list[str] = []
            page.on("request", lambda request, seen=requests: seen.append(request.url))
            for path in run.iterdir():
                path.unlink()
        found = []
        for step in (6, 2):
            page.locator("#step-number").fill(str(step))
            page.keyboard.press("Enter")
            page.wait_for_selector(f"body[data-step='{step}']")
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
            sync_api.expect(page.locator(_WITHOUT_TABLE)).to_have_count(0)
            texts = [row["text"] for row in rollout_rows(step)]
            completion = page.locator("pre.completion")
            page.locator("#rows").press("ArrowDown")
            sync_api.expect(completion).to_have_text(texts[1])
            page.select_option("#rollout-line", label="worker 1")
            sync_api.expect(completion).to_have_text(texts[0])  # the step is shown anew
            found.append(page.locator("main > :not(header)").all_inner_texts())
        shown[is_report] = found
    assert shown[True] == shown[False]
    assert page.locator("#connection").inner_text().startswith("written 20")
    assert requests == []


def test_a_report_of_many_steps_has_the_newest_in_detail(open_page, run, monkeypatch):
    monkeypatch.setattr(report, "MOST_BYTES", 25_000)
    page = open_page(run, as_report=True)
    assert [row["step"] for row in numbers(page, "panel-speed")] == list("123456")
    page.locator("#step-number").fill("1")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#missing")).to_contain_text("is not in this report")
    assert not page.locator("#of-step").is_visible()
    page.locator("#step-number").fill("6")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#missing")).to_have_text("")
    assert page.locator("#panel-rollout").is_visible()
