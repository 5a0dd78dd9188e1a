"""Terminal output of a run: what is being done, one line per step, and the summary.

    with console.phase("step", "3/12"), console.phase("rollout", total=64): ...

    step 3/12, rollout: 12/64 done, 30 running, drafting, 310 tokens/s, about 40 s left

On a terminal this is a live line; elsewhere it is printed when nothing else was for 10 s. Progress
goes to stderr, the summary to stdout.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longtail.cluster.records import Progress
from longtail.generator import StepReport
from longtail.run.summary import Summary, summary_lines

_REFRESH_S = 0.2
_SILENCE_S = 10.0
"""Most seconds without a line where there is no terminal."""
_MOST_TEXT = 120
"""Characters that are shown of a completion."""


@dataclass(slots=True, kw_only=True)
class _Phase:
    """Something that takes a while."""

    title: str
    began_s: float
    total: int = 0
    """Number of parts; 0 if it has none."""
    num_done: int = 0
    done_s: float = 0.0
    """Time at which `num_done` last rose."""
    detail: str = ""
    is_tail: bool = False
    """Whether all parts that are left are being done: the longest may take many times the mean."""

    def status(self, now: float) -> str:
        """Return how far it is and how long it may still take."""
        each_s = (self.done_s - self.began_s) / max(self.num_done, 1)
        left = each_s * (self.total - self.num_done) - (now - self.done_s)
        time_text = f"about {left:.0f} s left" if left < 120 else f"about {left / 60:.0f} min left"
        if not self.num_done or left <= 0 or self.is_tail:
            time_text = f"{now - self.began_s:.0f} s so far"
        count = f"{self.num_done}/{self.total} done" if self.total else ""
        return ", ".join(filter(None, (count, self.detail, time_text)))


class Console:
    """Progress output; `prefix` begins each of its lines."""

    def __init__(self, prefix: str = "", *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._live = sys.stderr.isatty()
        self._prefix, self._clock = prefix, clock
        self._lock = threading.Lock()
        """Held while a line is written: `phase` starts a thread."""
        self._written_s = clock()
        self._phases: list[_Phase] = []
        self._tokens = 0
        self._has_shown_text = False

    def log(self, text: str) -> None:
        """Print one line of progress."""
        with self._lock:
            self._print(text)

    # ---- what is being done

    @contextmanager
    def phase(self, name: str, number: str = "", *, total: int = 0) -> Iterator[None]:
        """Show that this is being done until the context ends; phases may be nested."""
        ending, title = threading.Event(), f"{name} {number}".strip()
        self._phases.append(_Phase(title=title, began_s=self._clock(), total=total))
        self._tokens = 0
        beating = None
        if len(self._phases) == 1:
            beating = threading.Thread(target=self._beat_until, args=(ending,), daemon=True)
            beating.start()
        try:
            yield
        finally:
            self._phases.pop()
            ending.set()
            if beating is not None:
                beating.join()

    def count(self, num_done: int) -> None:
        """Set the number of parts of the innermost phase that are done."""
        phase = self._phases[-1]
        if num_done != phase.num_done:
            phase.num_done, phase.done_s = num_done, self._clock()

    def rollout_step(self, report: StepReport) -> None:
        """Add one step of a single engine to the innermost phase."""
        self._tokens += len(report.emitted)
        self.rollout_progress(
            Progress(
                num_finished=self._phases[-1].num_done + len(report.finished),
                num_generated=self._tokens,
                num_running=report.num_running,
                drafts=bool(report.verified) if report.speculates else None,
                text=report.finished[0].text if report.finished else "",
            )
        )

    def rollout_progress(self, progress: Progress) -> None:
        """Set the progress of the innermost phase; log the first text of all phases."""
        self.count(progress.num_finished)
        phase = self._phases[-1]
        phase.is_tail = progress.num_running >= phase.total - phase.num_done
        speed = progress.num_generated / max(self._clock() - phase.began_s, 1e-9)
        drafts = {None: "", False: "plain, ", True: "drafting, "}[progress.drafts]
        phase.detail = f"{progress.num_running} running, {drafts}{speed:,.0f} tokens/s"
        if progress.text and not self._has_shown_text:
            self._has_shown_text = True
            self.log(f"first text: {_one_line(progress.text)}")

    def beat(self) -> None:
        """Redraw the live line; without a terminal, print it if no other was for 10 s."""
        with self._lock:
            now, phases = self._clock(), list(self._phases)
            if not phases:
                return
            titles = ", ".join(phase.title for phase in phases)
            line = f"{titles}: {phases[-1].status(now)}"
            if self._live:
                line = f"{self._prefix}{line}"[: shutil.get_terminal_size().columns - 1]
                print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)
            elif now - self._written_s >= _SILENCE_S:
                self._print(line)

    def _beat_until(self, ending: threading.Event) -> None:
        while not ending.wait(_REFRESH_S if self._live else 1.0):
            self.beat()

    # ---- results

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        """Print one step's line."""

        def value(name: str) -> float:
            return metrics.get(name, float("nan"))

        failures = int(metrics.get("reward/failures", 0))
        accepted = metrics.get("speculation/accept_length", 0.0)
        waited = metrics.get("timing_s/environment", 0.0)
        self.log(
            f"step {step:>{len(str(steps))}}/{steps}  reward {value('reward/mean'):.3f}  "
            f"length p50 {value('response_length/p50'):.0f} "
            f"max {value('response_length/max'):.0f}  "
            f"tail idle {value('rollout/tail_idle_share'):.0%}  "
            f"{value('rollout/tokens_per_s'):,.0f} tokens/s  "
            f"rollout {value('timing_s/rollout'):.1f} s of {value('timing_s/step'):.1f} s"
            + (f"  environments {waited / value('timing_s/rollout'):.0%}" if waited else "")
            + (f"  accept {accepted:.2f}" if accepted else "")
            + (f"  {failures} ungraded" if failures else "")
        )

    def summary(self, summary: Summary, run_dir: Path) -> None:
        """Print the summary on stdout."""
        self._clear()
        for label, text in summary_lines(summary, run_dir):
            print(f"{label:<17} {text}")

    def _print(self, text: str) -> None:
        self._clear()
        print(f"{self._prefix}{text}", file=sys.stderr, flush=True)
        self._written_s = self._clock()

    def _clear(self) -> None:
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    """Return the beginning of a text without line breaks and terminal codes."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= _MOST_TEXT else f"{words[:_MOST_TEXT]} ..."
