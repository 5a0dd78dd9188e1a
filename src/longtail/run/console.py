"""Terminal output of a run: a live line, one line per step, and the summary.

Progress goes to stderr, the summary to stdout.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from longtail.cluster.records import Progress
from longtail.engine.report import StepReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.run.summary import RunSummary

_REFRESH_S = 0.2
_WIDE = 200
"""Columns of the summary in a file, enough to keep paths on one line."""


class Console:
    """Progress output; the live line is only drawn on a terminal."""

    def __init__(self) -> None:
        self._out = RichConsole(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
        self._live = sys.stderr.isatty()
        self._drawn = 0.0
        self._label, self._total = "", 0
        self._done, self._tokens, self._began = 0, 0, 0.0

    def log(self, text: str) -> None:
        """Print one line of progress."""
        self._clear()
        print(text, file=sys.stderr, flush=True)

    def begin_rollout(self, label: str, num_requests: int) -> None:
        """Start a rollout's live line, which `rollout_progress` updates."""
        self._label, self._total = label, num_requests
        self._done, self._tokens, self._began = 0, 0, time.perf_counter()

    def rollout_step(self, report: StepReport) -> None:
        """Add one step of a single engine, and redraw the live line."""
        self._done += len(report.finished)
        self._tokens += len(report.emitted)
        self.rollout_progress(
            Progress(
                num_finished=self._done,
                num_generated=self._tokens,
                num_running=report.num_running,
                drafts=bool(report.verified) if report.readings else None,
            )
        )

    def rollout_progress(self, progress: Progress) -> None:
        """Redraw the live line, a few times a second."""
        now = time.perf_counter()
        if self._live and now - self._drawn > _REFRESH_S:
            self._drawn = now
            speed = progress.num_generated / max(now - self._began, 1e-9)
            drafts = {None: "", False: "plain, ", True: "drafting, "}[progress.drafts]
            line = (
                f"{self._label}: {progress.num_finished}/{self._total} done, "
                f"{progress.num_running} running, {drafts}{speed:,.0f} tokens/s"
            )
            print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def step(
        self,
        step: int,
        steps: int,
        metrics: Mapping[str, float],
        series: RolloutSeries | None = None,
    ) -> None:
        """Print one step's line; a speculating engine has `series`."""

        def value(name: str) -> float:
            return metrics.get(name, float("nan"))

        failures = int(metrics.get("reward/failures", 0))
        accepted = metrics.get("speculation/accept_length", 0.0)
        self.log(
            f"step {step:>{len(str(steps))}}/{steps}  reward {value('reward/mean'):.3f}  "
            f"length p50 {value('response_length/p50'):.0f} "
            f"max {value('response_length/max'):.0f}  "
            f"tail idle {value('rollout/tail_idle_share'):.0%}  "
            f"{value('rollout/tokens_per_s'):,.0f} tokens/s  "
            f"rollout {value('timing_s/rollout'):.1f} s of {value('timing_s/step'):.1f} s"
            + (f"  accept {accepted:.2f}" if accepted else "")
            + (f"  {failures} ungraded" if failures else "")
            + ("" if series is None else _switches(series))
        )

    def summary(self, summary: RunSummary, run_dir: Path) -> None:
        """Print the summary on stdout."""
        self._clear()
        table = Table(show_header=False, title="longtail", title_justify="left")
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for label, text in summary.lines(run_dir):
            table.add_row(label, Text(text))  # not markup: a path may hold brackets
        self._out.print(table)

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _switches(series: RolloutSeries) -> str:
    """Return the last switch between drafting and plain decoding, and the number of switches."""
    last = series.last_switch
    if last is None:
        return ""
    count = f" ({len(series.switches)} switches)" if len(series.switches) > 1 else ""
    why = f": {last.reason}" if last.reason else ""
    return f"  {'drafting' if last.drafts else 'plain'} at the end{count}{why}"
