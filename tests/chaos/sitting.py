"""One process of a run, observed: it is waited for with a bound, struck, and cleaned up after.

A run is a directory; each of its sittings has a directory in it.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from chaos import diary

_ROOT = Path(__file__).parents[2]
_PROGRAM = "import sys; from chaos import observed; sys.exit(observed.main(sys.argv[1:]))"
"""Imported, not `-m`: Ray pickles what a main module defines instead of its name."""
_MARK = "LONGTAIL_CHAOS_RUN"
"""An environment variable that every process of a run inherits: so leftovers are found."""
_POLL_S = 0.002
_LEFTOVER_S = 90.0
"""For the processes of a run to end after its driver: Ray's agents take their time."""


class Failure(Exception):  # noqa: N818 - what a chaos run looks for
    """The run hung, crashed, left processes, or wrote other texts."""


class Sitting:
    """`longtail WORDS` in a process of its own; `place` gets its diary, its log and its stacks."""

    def __init__(self, words: list[str], place: Path, *, patience_s: float) -> None:
        place.mkdir(parents=True)
        self._place, self._patience_s = place, patience_s
        path = os.pathsep.join([str(_ROOT / "tests"), str(_ROOT / "src")])
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            _MARK: str(place.parent),
        }
        self.began = self._heard = time.monotonic()
        self.diary = diary.Reader(place / "diary.jsonl")
        self.log = place / "log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(self.diary.path), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the process ended before it held.

        Raises Failure if nothing happens for as long as the patience lasts.
        """
        while True:
            has_ended = self.code is not None
            if self.diary.read():
                self._heard = time.monotonic()
            if condition():
                return True
            if has_ended:
                return False
            silent_s = time.monotonic() - self._heard
            if silent_s > self._patience_s:
                raise Failure(f"hang: nothing happened for {silent_s:.0f} s; {self._standing()}")
            time.sleep(_POLL_S)

    def strike(self, who: int) -> bool:
        """Kill a worker or the driver; return False if it has no process that is known."""
        pid = self._process.pid if who == diary.DRIVER else self._pid(who)
        if not pid:
            return False
        os.kill(pid, signal.SIGKILL)
        if who == diary.DRIVER:
            self._process.wait()
        return True

    def show_stacks(self) -> None:
        """Make every process of the run that can write the stacks of its threads."""
        known = [self._process.pid, *map(self._pid, self.diary.workers)]
        for pid in filter(None, known):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    def end(self) -> None:
        """Kill the driver if it is still there. What it leaves is `leftovers`' business."""
        self._process.kill()
        self._process.wait()

    def _pid(self, worker: int) -> int:
        """Return a worker's process; 0 if none is known, or it is a worker no more."""
        pid = self.diary.actors[worker].pid
        try:
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return 0
        return pid if name.startswith(b"ray::") else 0

    def _standing(self) -> str:
        actors = sorted(self.diary.actors.items())
        return "; ".join(
            f"{'driver' if who == diary.DRIVER else f'worker {who}'}: {actor.activity}"
            for who, actor in actors
        )


def leftovers(place: Path) -> list[str]:
    """Wait for the last processes of the run in `place`; kill those that stay, and return them."""
    deadline = time.monotonic() + _LEFTOVER_S
    while (left := dict(_marked(place))) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def _marked(run: Path) -> Iterator[tuple[int, str]]:
    """Find the processes that carry a run's mark: by pid, how they were called."""
    mark = f"{_MARK}={run}".encode()
    for place in Path("/proc").iterdir():
        try:
            if mark in (place / "environ").read_bytes().split(b"\0"):
                name = (place / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
                yield int(place.name), name.decode(errors="replace").strip()
        except (OSError, ValueError):
            continue
