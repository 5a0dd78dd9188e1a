"""The files of one run as a page shows them: JSON values of bounded size.

Nothing here writes, and nothing fails on a damaged, half-written, replaced or missing file: what
cannot be read is None or left out.
"""

import os
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from longtail.errors import ConfigError
from longtail.system.files import process_of
from longtail.view.lines import lines_of, open_regular, step_of_row
from longtail.view.series import FILE as METRICS
from longtail.view.series import MetricSeries
from longtail.view.speculation import read_rollout
from longtail.view.texts import read_lengths, read_rows, read_text
from longtail.view.timeline import read_timeline
from longtail.view.values import count, number, row_of, short, text

CONFIG, SUMMARY, DECISIONS = "config.toml", "summary.json", "drafter.jsonl"
_FOLLOWED = (METRICS, "trace.json", "rollouts.jsonl", "speculation.jsonl", SUMMARY, CONFIG)
_MOST_DECISIONS, _MOST_METRICS, _MOST_BYTES = 200, 500, 2**22


@final
class RunFiles:
    """Reads the files of a run; its methods may be called by several threads."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self._series = MetricSeries(directory)
        self._lock = threading.Lock()

    def stamp(self) -> str:
        """Return a text that changes whenever a file of the run does, or more of it was read."""
        stamps = [_stamp(self.directory / name) for name in _FOLLOWED]
        return ";".join([*stamps, str(self._series.offset)])

    def describe(self) -> dict[str, Any]:
        """Return name, state, progress and settings of the run."""
        config, summary = self._config(), self._summary()
        with self._lock:
            self._series.update()
            steps = self._series.steps
            last = steps[-1] if steps else 0
        wanted = count(_section(config, "run").get("steps"))
        is_done = summary is not None and count(summary.get("steps")) == last > 0
        is_running = not is_done and process_of(self.directory) is not None
        settings = {
            "model": text(_section(config, "model").get("path"), 200),
            "drafter": text(_section(config, "speculation").get("drafter"), 200),
            "workers": count(_section(config, "cluster").get("workers")),
            "spot": text(_section(config, "spot").get("train"), 20),
            "keeps_rollouts": _section(config, "run").get("save_rollouts") is not False,
        }
        return {
            "name": self.name,
            "directory": text(str(self.directory), 500),
            "state": "finished" if is_done else "running" if is_running else "stopped",
            "step": last,
            "steps": wanted,
            "settings": settings,
            "reward_before": short(number((summary or {}).get("reward_before"))),
            "reward_after": short(number((summary or {}).get("reward_after"))),
            "seconds": short(number((summary or {}).get("seconds"))),
        }

    def overview(self, first: int | None = None, last: int | None = None) -> dict[str, Any]:
        """Return the metrics by step, joined to a bounded number of points."""
        summary = self._summary()
        with self._lock:
            self._series.update()
            extract = self._series.extract(first, last)
        after = number((summary or {}).get("reward_after"))
        step = count((summary or {}).get("steps"))
        if (
            after is not None
            and step
            and step == extract["last"]
            and (last is None or last >= step)
        ):
            extract["held_out"].append([step, short(after)])
        return extract

    def step(self, step: int, *, line: int | None = None) -> dict[str, Any]:
        """Return one step: workers' states, lengths, a rollout and decisions about the drafter."""
        with self._lock:
            self._series.update()
            step_s = self._series.value("timing_s/step", step)
        return {
            "step": step,
            "step_s": short(step_s),
            "timeline": read_timeline(self.directory, step),
            "lengths": read_lengths(self.directory, step),
            "speculation": read_rollout(self.directory, step, line),
            "decisions": self._decisions(step),
            "metrics": self._metrics(step),
        }

    def timeline(self, step: int, window: tuple[float, float]) -> dict[str, Any] | None:
        """Return the workers' states in some seconds of a step, for a closer look."""
        return read_timeline(self.directory, step, window)

    def rollouts(self, step: int) -> dict[str, Any]:
        """Return the completions of a step without their texts."""
        return read_rows(self.directory, step)

    def rollout(self, step: int, index: int) -> dict[str, Any] | None:
        """Return one completion of a step with its texts; None without it."""
        return read_text(self.directory, step, index)

    def _metrics(self, step: int) -> dict[str, Any]:
        """Return all metrics of a step."""
        found: dict[str, Any] = {}
        for line in lines_of(self.directory / METRICS, step, step_of_row):
            for name, value in list(row_of(line).items())[:_MOST_METRICS]:
                found[text(name, 100)] = short(number(value))
        return found

    def _decisions(self, step: int) -> list[dict[str, Any]]:
        """Return what was decided about the drafter in a step."""
        rows = [row_of(line) for line in lines_of(self.directory / DECISIONS, step, step_of_row)]
        return [
            {
                "what": text(row.get("what"), 20),
                "version": count(row.get("version")),
                "before": short(number(row.get("before"))),
                "after": short(number(row.get("after"))),
                "num_tokens": count(row.get("num_tokens")),
                "reason": text(row.get("reason"), 200),
            }
            for row in rows[-_MOST_DECISIONS:]
        ]

    def _summary(self) -> dict[str, Any] | None:
        """Return summary.json; None without one."""
        return row_of(_bytes(self.directory / SUMMARY)) or None

    def _config(self) -> dict[str, Any]:
        """Return config.toml; {} if it cannot be read."""
        try:
            return tomllib.loads(_bytes(self.directory / CONFIG).decode())
        except (ValueError, RecursionError):
            return {}


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
        names = ["/".join(path.parts[-2:]) for path in paths]
    if len(set(names)) < len(names):
        names = [f"{number}: {name}" for number, name in enumerate(names, start=1)]
    return [
        RunFiles(path, text(os.fsencode(name).decode(errors="replace"), 200))
        for path, name in zip(paths, names, strict=True)
    ]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _stamp(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def _bytes(path: Path) -> bytes:
    """Return a small file; empty if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
