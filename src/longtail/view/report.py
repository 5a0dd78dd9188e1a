"""`longtail report`: the page of `longtail view` as one file, with the data of a run in it.

The page finds in `#data` what it would fetch from the server: the metrics of all steps, and the
newest steps in detail, as many as fit into `MOST_BYTES`. It loads nothing.
"""

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from longtail.config.command_options import ReportOptions
from longtail.system.files import write_atomically, writing
from longtail.view.run_files import RunFiles, open_runs

_log = logging.getLogger("longtail")
FILE = "report.html"
STATIC = Path(__file__).parent / "static"
MOST_BYTES = 16 * 2**20
_MODULES = ("format", "charts", "timeline", "by_step", "of_step", "reader", "page")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"


def run(args: ReportOptions) -> int:
    """Write the report of a run, and print its path."""
    print(write_report(Path(args.run)))
    return 0


def write_report(directory: Path) -> Path:
    """Write report.html into a run's directory and return its path.

    Raises ConfigError if no run has written there, CheckpointError if the file cannot be written.
    """
    (files,) = open_runs([str(directory)])
    path = directory / FILE
    with writing("the report", path, "free some space, or make it writable"):
        write_atomically(path, render(files))
    if num_others := sum(files.left_out.values()):
        _log.warning("%s: %d lines of logs are of another kind, and left out", path, num_others)
    return path


def render(run: RunFiles) -> str:
    """Return the page with the data of a run."""
    parts = {
        "uPlot.min.css": f"<style>{_static('uPlot.min.css')}</style>",
        "page.css": f"<style>{_static('page.css')}</style>",
        "uPlot.iife.min.js": f"<script>{_static('uPlot.iife.min.js')}</script>",
        "page.js": f'<script type="application/json" id="data">{_data(run)}</script>\n'
        f'<script type="module">{_script()}</script>',
        "icon.svg": f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<!-- uPlot, which draws the plots:\n{_static('uPlot.LICENSE.txt')}-->",
    }
    tags = r'<(?:link|script)\b[^>]*"/static/([\w.]+)"[^>]*>(?:</script>)?'
    return re.sub(tags, lambda found: parts[found[1]], _static("page.html"))


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _script() -> str:
    """Return the page's modules as one: without imports and exports, each after what it uses."""
    text = "\n".join(_static(f"{name}.js") for name in _MODULES)
    return re.sub(r"^(import .*\n|export )", "", text, flags=re.MULTILINE)


def _data(run: RunFiles) -> str:
    """Return JSON by path, without a character that could end the element it is in."""
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    found = [
        _entry("written", written),
        _entry("/api/runs", [run.describe()]),
        _entry("/api/runs/0/overview", run.overview()),
    ]
    num_bytes = 0
    for step in reversed(run.steps):
        own = list(_of_step(run, step))
        num_bytes += sum(map(len, own))
        if num_bytes > MOST_BYTES:
            break
        found += own
    return "{" + ",\n".join(found).replace("<", r"\u003c") + "}"


def _of_step(run: RunFiles, step: int) -> Iterator[str]:
    path = f"/api/runs/0/steps/{step}"
    yield _entry(path, run.step(step))
    for index, rollout in enumerate(run.rollouts(step)):
        yield _entry(f"{path}/rollouts/{index}", rollout)
    yield _entry(f"{path}/completions", run.completions(step))
    for index, text in enumerate(run.texts(step)):
        yield _entry(f"{path}/completions/{index}", text)


def _entry(path: str, value: object) -> str:
    return f"{json.dumps(path)}: {json.dumps(value, allow_nan=False)}"
