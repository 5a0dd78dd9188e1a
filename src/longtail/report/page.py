"""`longtail report`: a run on one page, the picture of a rollout, and why it drafted when it did.

The page is one file: its picture and its style are inside, so that it can be sent around. It is
made of what the run wrote (summary.json, metrics.jsonl, speculation.jsonl, cost.json), at any time,
also while the run goes on; what is not there yet is left out, and said. Only speculation.jsonl
must be there.
"""

import argparse
import base64
import html
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from longtail.engine import rollout_log
from longtail.engine.rollout_log import LoggedRollout, read_rollout
from longtail.errors import CheckpointError, ConfigError, LongtailError
from longtail.report.rollout_plot import draw, plain_share
from longtail.run.metrics import Number
from longtail.run.summary import read_metrics, read_summary
from longtail.tuner import cost_file

_LAST = 50
"""Switches in the table."""
_WIDE, _HIGH = 520, 120
"""Of a chart, in its own units."""


def run(args: argparse.Namespace) -> int:
    """Write picture and page as the command line says; see `cli` for the options."""
    page = write_report(Path(args.run), step=args.step, say=_say)
    print(page)
    return 0


def report_if_possible(directory: Path, say: Callable[[str], None]) -> None:
    """Write the report of a run that speculated, where matplotlib is; never fail."""
    if find_spec("matplotlib") is None or not (directory / rollout_log.FILE).exists():
        return
    try:
        write_report(directory, say=say)
    except (
        ArithmeticError, ImportError, LongtailError, LookupError, MemoryError, OSError,
        RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        say(f"no report: {error}")


def write_report(directory: Path, *, step: int | None = None, say: Callable[[str], None]) -> Path:
    """Write rollout.png and report.html into a run's directory; return the page's path.

    Of a training step's rollout, by default the last one. Without matplotlib the page has no
    picture, which `say` hears. Raises ConfigError if the run has no such step, CheckpointError when
    the disk refuses.
    """
    logged = read_rollout(directory / rollout_log.FILE, step)
    picture, page = directory / "rollout.png", directory / "report.html"
    try:
        _draw(logged, picture)
        image = base64.b64encode(picture.read_bytes()).decode()
        shown = f'<img alt="{_text(headline(logged))}" src="data:image/png;base64,{image}">'
    except ConfigError as error:
        say(f"report: {error}")
        shown = f"<p>There is no picture: {_text(str(error))}</p>"
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
    """Draw beside the picture's place, then put it there: a reader never sees half of it."""
    temporary = path.with_name(f".new-{path.name}")
    draw(logged.series, temporary, title=headline(logged))
    temporary.replace(path)


def _unwritten(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: {error.strerror}; free some space, or see that it can be written"
    )


def headline(logged: LoggedRollout) -> str:
    """Say which rollout it is, in one line."""
    series = logged.series
    return (
        f"Rollout of step {logged.step}: up to {max(series.running):,} requests at a time, "
        f"{series.num_steps:,} engine steps, {series.seconds[-1]:.1f} s"
    )


def render(directory: Path, logged: LoggedRollout, picture: str) -> str:
    """Return the page; `picture` is HTML already, everything else is escaped."""
    name = directory.resolve().name
    sections = [
        f"<h1>{_text(name)}</h1>",
        _card(directory),
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


def _card(directory: Path) -> str:
    """Show the card's lines; the report's own is left out."""
    try:
        lines = read_summary(directory / "summary.json").lines(directory)
    except (OSError, ValueError):
        return "<p>The run has no card: it is written when all steps are done.</p>"
    return _table((), [line for line in lines if line[0] != "report"], heads=True)


def _switches(logged: LoggedRollout) -> str:
    """Show when the engine changed its mind, and why."""
    series = logged.series
    share = f"{plain_share(series):.0%} of the time was plain decoding."
    if not series.switches:
        return f"<h2>Switches</h2><p>There was none. {share}</p>"
    count = len(series.switches)
    last = f" These are the last {_LAST}." if count > _LAST else ""
    rows = [
        (
            f"{series.begin_of(index):.2f} s",
            f"{series.running[index]:,}",
            "drafting" if switch.drafts else "plain",
            switch.reason or "(no reason was given)",
        )
        for index, switch in series.switches[-_LAST:]
    ]
    times = "once" if count == 1 else f"{count} times"
    return f"<h2>Switches</h2><p>It switched {times}. {share}{last}</p>" + _table(
        ("at", "running", "from then on", "why"), rows
    )


def _costs(directory: Path) -> str:
    """Show what steps and drafts cost."""
    title = "<h2>What steps cost on this machine</h2>"
    path = directory / cost_file.FILE
    if not path.exists():
        return f"{title}<p>It was not measured.</p>"
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
        f"{title}<p>A step of so many tokens, as the run knew it at its end; "
        f"{_text(cost_file.context_time(costs))}.</p>"
        + _table(("tokens", "plain step", "step that checks drafts"), rows)
        + _table((), drafts, heads=True)
    )


def _history(directory: Path) -> str:
    """Chart what the run reached and how long its rollouts took, step by step."""
    rows = _metrics(directory / "metrics.jsonl")
    charts = [
        ("mean reward", "reward/mean", "{:.3f}"),
        ("seconds of a rollout", "timing_s/rollout", "{:.1f} s"),
        ("accept length", "speculation/accept_length", "{:.2f}"),
    ]
    drawn = [_chart(title, _points(rows, name), form) for title, name, form in charts]
    return f'<h2>Step by step</h2><div class="charts">{"".join(drawn)}</div>'


def _metrics(path: Path) -> list[dict[str, Number | None]]:
    """Read the lines of metrics.jsonl that are whole; none where there is no such file."""
    try:
        return read_metrics(path)
    except CheckpointError:
        return []


def _points(rows: Iterable[Mapping[str, Number | None]], name: str) -> list[tuple[int, float]]:
    """Return step and value where there is one."""
    pairs = ((row["step"], row.get(name)) for row in rows)
    return [
        (int(step), float(value)) for step, value in pairs if step is not None and value is not None
    ]


def _chart(title: str, points: Sequence[tuple[int, float]], form: str) -> str:
    """Draw a line, with its first and last value and its range said in words."""
    if not points:
        return ""
    steps, values = [step for step, _ in points], [value for _, value in points]
    low, high = min(values), max(values)
    across, up = max(steps[-1] - steps[0], 1), (high - low) or 1.0
    line = " ".join(
        f"{_WIDE * (step - steps[0]) / across:.1f},{_HIGH * (high - value) / up:.1f}"
        for step, value in points
    )
    said = (
        f"{title}: {form.format(values[0])} in step {steps[0]}, {form.format(values[-1])} in step "
        f"{steps[-1]}; {form.format(low)} to {form.format(high)}"
    )
    return (
        f'<figure class="chart"><svg viewBox="-4 -6 {_WIDE + 8} {_HIGH + 12}" role="img" '
        f'aria-label="{_text(said)}"><path class="frame" d="M0,0V{_HIGH}H{_WIDE}"/>'
        f'<polyline points="{line}"/></svg><figcaption>{_text(said)}</figcaption></figure>'
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, heads: bool = False) -> str:
    """Return a table of texts; with `heads` the first of each row is its head."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        return "".join(f"<{tag}>{_text(text)}</{tag}>" for text in texts)

    lines = [cells("th", columns)] if columns else []
    lines += [cells("th", row[: int(heads)]) + cells("td", row[int(heads) :]) for row in rows]
    return f'<div class="wide"><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>'


def _text(text: str) -> str:
    return html.escape(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
img { width: 100%; height: auto; background: #fff; border-radius: 6px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 8px 0; }
th, td { text-align: left; vertical-align: top; padding: 4px 18px 4px 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(280px, 1fr)); gap: 20px; }
svg { width: 100%; height: auto; }
polyline { fill: none; stroke: var(--mark); stroke-width: 2; stroke-linejoin: round; }
.frame { fill: none; stroke: var(--line); }
figcaption, footer { color: var(--soft); font-size: 13px; }
footer { margin-top: 40px; }
"""
