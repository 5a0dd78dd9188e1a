"""Pictures of the page of `longtail view` for the pages of the documentation.

    PYTHONPATH=tests python benchmarks/view_pictures.py runs/quickstart docs/img

They show the curves of a run in light colours, and its last step in dark ones.
"""

import argparse
import shutil
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, sync_playwright

from longtail.view.run_files import open_runs
from support.http_threads import viewing

WIDTH = 1240


def picture(browser: Browser, url: str, path: Path, scheme: Literal["light", "dark"]) -> None:
    """Write the upper part of the page in light colours, or the part of one step in dark ones."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("body[data-step] #text pre.completion")
    page.select_option("#order", "long")  # a long completion has drafts
    page.wait_for_timeout(500)
    bottom = page.locator("#panel-timeline").bounding_box()
    whole = page.locator("main").bounding_box()
    assert bottom is not None
    assert whole is not None
    split = bottom["y"] + bottom["height"] + 8
    top, height = (0.0, split) if scheme == "light" else (bottom["y"] - 70, 0.0)
    height = height or whole["y"] + whole["height"] - top - 90
    page.screenshot(
        path=path, full_page=True, clip={"x": 0.0, "y": top, "width": WIDTH, "height": height}
    )
    context.close()


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with viewing(open_runs([args.run])) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        picture(browser, url, args.directory / "view.png", "light")
        picture(browser, url, args.directory / "view-step.png", "dark")
        browser.close()


if __name__ == "__main__":
    main()
