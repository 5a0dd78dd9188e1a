"""Pictures of the page of `longtail view` for the pages of the documentation.

    PYTHONPATH=tests python -m support.view_pictures runs/quickstart docs/img

They show the curves of a run in light colours, and its last step in dark ones.
"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from longtail.view.run_files import open_runs
from support.http_threads import viewing

WIDTH = 1240


def picture(browser: Browser, url: str, path: Path, scheme: str) -> None:
    """Write the upper part of the page in light colours, or the part of one step in dark ones."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("body[data-step] #text pre.completion")
    page.wait_for_timeout(500)
    bottom, whole = (page.locator(name).bounding_box() for name in ("#panel-timeline", "main"))
    assert bottom is not None
    assert whole is not None
    split = bottom["y"] + bottom["height"] + 8
    end = whole["y"] + whole["height"] - 90
    top, height = (0.0, split) if scheme == "light" else (bottom["y"] - 70, end - bottom["y"] + 70)
    clip = {"x": 0.0, "y": top, "width": WIDTH, "height": height}
    page.screenshot(path=path, full_page=True, clip=clip)
    context.close()


def main() -> None:
    """Write both pictures."""
    run, directory = sys.argv[1:]
    chromium = shutil.which("chromium")
    with viewing(open_runs([run])) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        picture(browser, url, Path(directory, "view.png"), "light")
        picture(browser, url, Path(directory, "view-step.png"), "dark")


if __name__ == "__main__":
    main()
