"""`longtail report`: a run on one HTML page, with the plot of a rollout and its drafting decisions.

The page is one self-contained file. It is made from the files of the run (summary.json,
metrics.jsonl, speculation.jsonl, cost.json), also while the run continues. Only speculation.jsonl
is required; the page states which of the others are missing.
"""

import argparse
import base64
import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from longtail.engine import rollout_log
from longtail.engine.rollout_log import LoggedRollout, read_rollout
from longtail.errors import CheckpointError, ConfigError, LongtailError
from longtail.report.rollout_plot import draw, plain_share
from longtail.run import summary
from longtail.run.metrics import Number
from longtail.run.summary import read_metrics, read_summary
from longtail.system.device import to_stderr
from longtail.tuner import cost_file

_LAST = 50
"""Largest number of switches in the table."""
_WIDE, _HIGH = 520, 120
"""Width and height of a chart, in SVG units."""


def run(args: argparse.Namespace) -> int:
    """Run `longtail report`: write the plot and the page, and print the page's path."""
    page = write_report(Path(args.run), step=args.step, log=to_stderr)
    print(page)
    return 0


def report_if_possible(directory: Path, log: Callable[[str], None]) -> None:
    """Write the report of a run that speculated, if matplotlib is installed; log any failure."""
    if find_spec("matplotlib") is None or not (directory / rollout_log.FILE).exists():
        return
    try:
        write_report(directory, log=log)
    except (
        ArithmeticError, ImportError, LongtailError, LookupError, MemoryError, OSError,
        RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        log(f"no report: {error}")


def write_report(directory: Path, *, step: int | None = None, log: Callable[[str], None]) -> Path:
    """Write rollout.png and report.html into a run's directory; return the page's path.

    They show the rollout of `step`, by default the last one. Without matplotlib the page has no
    plot, and a message is logged. Raises ConfigError if the run has no such step, CheckpointError
    if a file cannot be written.
    """
    logged = read_rollout(directory / rollout_log.FILE, step)
    picture, page = directory / "rollout.png", directory / "report.html"
    try:
        _draw(logged, picture)
        image = base64.b64encode(picture.read_bytes()).decode()
        shown = f'<img alt="{_text(headline(logged))}" src="data:image/png;base64,{image}">'
    except ConfigError as error:
        log(f"report: {error}")
        shown = f"<p>There is no plot: {_text(str(error))}</p>"
    except OSError as error:
        raise _unwritten(picture, error) from error
    text = render(directory, logged, shown)
    temporary = page.with_name(f".new-{page.name}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(page)
    except OSError as error:
        raise _unwritten(page, error) from error
    return page


def _draw(logged: LoggedRollout, path: Path) -> None:
    """Draw into a temporary file and rename it, so that readers see a whole plot."""
    temporary = path.with_name(f".new-{path.name}")
    draw(logged.series, temporary, title=headline(logged))
    temporary.replace(path)


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}: {error.strerror}; free some space, or make it writable")


def headline(logged: LoggedRollout) -> str:
    """Return one line about a rollout: its step, requests, engine steps and seconds."""
    series = logged.series
    return (
        f"Rollout of step {logged.step}: up to {max(series.running):,} requests at a time, "
        f"{series.num_steps:,} engine steps, {series.seconds[-1]:.1f} s"
    )


def render(directory: Path, logged: LoggedRollout, picture: str) -> str:
    """Return the page. `picture` is HTML; all other texts are escaped."""
    name = directory.resolve().name
    sections = [
        f"<h1>{_text(name)}</h1>",
        _summary(directory),
        f"<h2>{_text(headline(logged))}</h2>",
        f"<figure>{picture}</figure>",
        _switches(logged),
        _history(directory),
        _costs(directory),
        f"<footer>longtail report {_text(str(directory))}</footer>",
    ]
    body = "\n".join(sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>longtail: {_text(name)}</title><style>{_STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _summary(directory: Path) -> str:
    """Return the run's summary, except for the path of the report."""
    try:
        lines = read_summary(directory / summary.FILE).lines(directory)
    except (OSError, ValueError):
        return "<p>There is no summary yet: a run writes it after its last step.</p>"
    return _table((), [line for line in lines if line[0] != "report"], heads=True)


def _switches(logged: LoggedRollout) -> str:
    """Return the table of switches between drafting and plain decoding."""
    series = logged.series
    title = "<h2>Switches between drafting and plain decoding</h2>"
    share = f"The engine decoded plainly for {plain_share(series):.0%} of the time"
    count = len(series.switches)
    if not count:
        return f"{title}<p>{share} and never switched.</p>"
    last = f" The table lists the last {_LAST}." if count > _LAST else ""
    rows = [
        (
            f"{series.begin_of(index):.2f} s",
            f"{series.running[index]:,}",
            "drafting" if switch.drafts else "plain",
            switch.reason or "(no reason recorded)",
        )
        for index, switch in series.switches[-_LAST:]
    ]
    times = "once" if count == 1 else f"{count} times"
    return f"{title}<p>{share} and switched {times}.{last}</p>" + _table(
        ("time", "running requests", "switched to", "reason"), rows
    )


def _costs(directory: Path) -> str:
    """Return the cost model: seconds of engine steps and of drafts."""
    title = "<h2>Cost model of this machine</h2>"
    path = directory / cost_file.FILE
    if not path.exists():
        return f"{title}<p>No costs were measured.</p>"
    try:
        costs = cost_file.load_costs(path)
    except ConfigError as error:
        return f"{title}<p>{_text(str(error))}</p>"
    rows = [
        (f"{each.tokens}", f"{each.plain_ms:.2f} ms", f"{each.verify_ms:.2f} ms")
        for each in cost_file.step_times(costs)
    ]
    drafts = [
        (f"drafter {place}", cost_file.draft_times(draft))
        for place, draft in enumerate(costs.drafts, 1)
    ]
    return (
        f"{title}<p>Time of an engine step by its number of tokens, as last measured; "
        f"{_text(cost_file.context_time(costs))}.</p>"
        + _table(("tokens", "plain step", "step that verifies drafts"), rows)
        + _table((), drafts, heads=True)
    )


def _history(directory: Path) -> str:
    """Return charts of reward, rollout time and accept length over the steps."""
    rows = _metrics(directory / "metrics.jsonl")
    charts = [
        ("mean reward", "reward/mean", "{:.3f}"),
        ("rollout time", "timing_s/rollout", "{:.1f} s"),
        ("accept length", "speculation/accept_length", "{:.2f}"),
    ]
    drawn = [_chart(title, _points(rows, name), form) for title, name, form in charts]
    return f'<h2>Training steps</h2><div class="charts">{"".join(drawn)}</div>'


def _metrics(path: Path) -> list[dict[str, Number | None]]:
    """Read metrics.jsonl; return no rows if it cannot be read."""
    try:
        return read_metrics(path)
    except CheckpointError:
        return []


def _points(rows: Iterable[Mapping[str, Number | None]], name: str) -> list[tuple[int, float]]:
    """Return the steps that have a value, with the value."""
    pairs = ((row["step"], row.get(name)) for row in rows)
    return [
        (int(step), float(value)) for step, value in pairs if step is not None and value is not None
    ]


def _chart(title: str, points: Sequence[tuple[int, float]], form: str) -> str:
    """Return a line chart, captioned with its first and last value and its range."""
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    across, up = max(steps[-1] - steps[0], 1), (high - low) or 1.0
    line = " ".join(
        f"{_WIDE * (step - steps[0]) / across:.1f},{_HIGH * (high - value) / up:.1f}"
        for step, value in points
    )
    caption = _text(
        f"{title}: {form.format(values[0])} in step {steps[0]}, {form.format(values[-1])} in step "
        f"{steps[-1]}; range {form.format(low)} to {form.format(high)}"
    )
    return (
        f'<figure class="chart"><svg viewBox="-4 -6 {_WIDE + 8} {_HIGH + 12}" role="img" '
        f'aria-label="{caption}"><path class="frame" d="M0,0V{_HIGH}H{_WIDE}"/>'
        f'<polyline points="{line}"/></svg><figcaption>{caption}</figcaption></figure>'
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, heads: bool = False) -> str:
    """Return a table of texts; with `heads` the first cell of each row is its heading."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{_text(text)}</{tag}>" for text in texts)

    lines = [cells("th", columns)] if columns else []
    lines += [cells("th", row[: int(heads)]) + cells("td", row[int(heads) :]) for row in rows]
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _text(text: str) -> str:
    return html.escape(text)


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2530; --soft: #5d6b7a; --line: #d8dee5; --paper: #fff;
  --mark: #1b7f79; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --soft: #9aa8b5; --line: #36414c;
  --paper: #14191f; --mark: #55c4bb; } }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 8px; }
figure { margin: 0; }
img { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 18px 4px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td:first-child { white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 20px; }
svg { width: 100%; height: auto; }
polyline { fill: none; stroke: var(--mark); stroke-width: 2; stroke-linejoin: round; }
.frame { fill: none; stroke: var(--line); }
figcaption, footer { color: var(--soft); font-size: 13px; }
footer { margin-top: 40px; }
"""
