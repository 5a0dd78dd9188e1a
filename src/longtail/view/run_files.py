"""The files of one run as a page shows them, as JSON values. Nothing here writes.

Files that are missing, half-written or replaced at this moment leave gaps; what longtail wrote is
taken as it is.
"""

import threading
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from longtail.errors import ConfigError
from longtail.run.metrics_log import is_number, is_row, read_line
from longtail.run.trace import TRACE_FILE, is_event
from longtail.system.files import parse_json, process_of
from longtail.view import steps
from longtail.view.series import FILE as METRICS
from longtail.view.series import MOST_BYTES, MetricSeries, lines_of_step, short

Row = dict[str, Any]

CONFIG, SUMMARY, ROLLOUTS = "config.toml", "summary.json", "rollouts.jsonl"
SPECULATION, DRAFTS = "speculation.jsonl", "drafts.jsonl"
_FOLLOWED = (METRICS, TRACE_FILE, ROLLOUTS, SPECULATION, SUMMARY, CONFIG)


_KINDS: Mapping[str, Callable[[Mapping[str, Any]], bool]] = MappingProxyType(
    {
        METRICS: is_row,
        TRACE_FILE: is_event,
        ROLLOUTS: steps.is_completion,
        DRAFTS: steps.has_drafts,
        SPECULATION: steps.is_rollout,
    }
)


@final
class RunFiles:
    """Reads the files of a run; its methods may be called by several threads."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self._series = MetricSeries(directory)
        self._lock = threading.Lock()
        self.left_out: dict[tuple[str, int], int] = {}
        """Number of lines of another kind by log and step, as far as they were read."""

    def stamp(self) -> str:
        """Return a text that changes whenever a file of the run does."""
        return ";".join(_stamp(self.directory / name) for name in _FOLLOWED)

    @property
    def steps(self) -> list[int]:
        """The steps in metrics.jsonl, ascending."""
        with self._lock:
            self._series.update()
            return list(self._series.columns["step"])

    def describe(self) -> Row:
        """Return name, state, progress and settings of the run."""
        config, summary = self._config(), self._summary()
        last = max(self.steps, default=0)

        def setting(section: str, name: str) -> Any:
            found = config.get(section)
            return found.get(name) if isinstance(found, dict) else None

        is_running = process_of(self.directory) is not None
        return {
            "name": self.name,
            "state": (
                "finished"
                if summary.get("steps") == last
                else "running"
                if is_running
                else "stopped"
            ),
            "step": last,
            "steps": setting("run", "steps"),
            "settings": {
                "model": setting("model", "path"),
                "drafter": setting("speculation", "drafter"),
                "workers": setting("cluster", "workers"),
                "keeps_rollouts": setting("run", "save_rollouts") is not False,
            },
            "seconds": short(summary.get("seconds")),
        }

    def overview(self) -> Row:
        """Return the metrics of all steps by name, and held-out rewards with their steps."""
        with self._lock:
            self._series.update()
            columns = {name: list(column) for name, column in self._series.columns.items()}
            held_out = self._series.held_out()
        summary = self._summary()
        after, step = summary.get("reward_after"), summary.get("steps")
        if is_number(after) and columns["step"][-1:] == [step]:
            held_out.append([step, short(after)])
        return {"columns": columns, "held_out": held_out}

    def step(self, step: int) -> Row:
        """Return one step: workers' states, lengths, decisions about the drafter, metrics.

        `rollouts` lists those of the method `rollouts`; the slowest worker's is the last.
        """
        (metrics,) = self._rows(METRICS, step)[-1:] or [{}]
        speculation = self._rows(SPECULATION, step)
        return {
            "step": step,
            "step_s": short(metrics.get("timing_s/step")),
            "timeline": steps.timeline(self._rows(TRACE_FILE, step)),
            "lengths": steps.lengths(self._rows(ROLLOUTS, step)),
            "rollouts": [{"kind": row["kind"], "worker": row["worker"]} for row in speculation],
            "decisions": self._rows("drafter.jsonl", step),
            "metrics": {name: short(value) for name, value in metrics.items()},
        }

    def rollouts(self, step: int) -> list[Row]:
        """Return the rollouts of a step over their seconds."""
        return [steps.speculation(row) for row in self._rows(SPECULATION, step)]

    def completions(self, step: int) -> Row:
        """Return the completions of a step without their texts."""
        return steps.listed(self._rows(ROLLOUTS, step))

    def texts(self, step: int) -> list[Row]:
        """Return the same completions with their texts."""
        rows = self._rows(ROLLOUTS, step)[: steps.MOST_ROWS]
        drafts = self._rows(DRAFTS, step)
        return [steps.completion(row, drafts) for row in rows]

    def _rows(self, name: str, step: int) -> list[Row]:
        """Return the lines of a step in a log that are of its kind."""
        lines, is_kind = lines_of_step(self.directory / name, step), _KINDS.get(name, bool)
        rows = [row for line in lines if (row := read_line(line, is_kind)) is not None]
        self.left_out[name, step] = len(lines) - len(rows)
        return rows

    def _summary(self) -> Row:
        """Return summary.json; {} without one."""
        return _table(self.directory / SUMMARY, parse_json)

    def _config(self) -> Row:
        """Return config.toml; {} without one."""
        return _table(self.directory / CONFIG, tomllib.loads)


def open_runs(places: list[str]) -> list[RunFiles]:
    """Return the files of run directories, with names that differ.

    Raises ConfigError for a directory that no run has written to.
    """
    directories = [Path(place) for place in places]
    for place, directory in zip(places, directories, strict=True):
        if not any((directory / name).exists() for name in (CONFIG, METRICS)):
            raise ConfigError(
                f"RUN = {place!r}: no run has written there; give the run.dir of longtail train"
            )
    paths = [directory.resolve() for directory in directories]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return [RunFiles(path, name) for path, name in zip(paths, names, strict=True)]


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _table(path: Path, parse: Callable[[str], Any]) -> Row:
    """Return a small file of names and values; {} if it cannot be read or is damaged."""
    try:
        with path.open("rb") as file:
            found = parse(file.read(MOST_BYTES).decode())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
