"""Faults at random moments in small runs, whose results must not change.

    make chaos MINUTES=20
    make chaos SEED=7

A trial is a run with rollouts, spot training, learning and checkpoints. At random moments a worker
is killed, a worker is stopped (it hangs) and the driver is killed. The run is started again
whenever it has ended, and at last its texts, rewards, logprobs and weights must be those of the
undisturbed run. A run that takes far too long hangs, which is a failure, as are a traceback, an
exit without the sentence that asks for a new start, and processes that outlive the run. The
directory of a trial that failed is kept; if it hung, its log ends with the stacks of all threads.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from end_to_end.workshop import build
from longtail.model.kernels import native
from longtail.system.device import DTYPES

ROOT = Path(__file__).parents[2]
SENTENCE = "start again: the run resumes from its newest checkpoint"
"""With it a run may end by itself, once too much of it is lost."""
WORKER_TIMEOUT_S = 15
_MARK = "LONGTAIL_CHAOS_RUN"
"""Environment variable that every process of a run inherits, so that all of them are found."""
_ENDED = re.compile(rb"^step \d+/\d+  ", re.MULTILINE)
"""The line of a step that has ended; lines of progress have a comma or a colon there."""
_LEFTOVER_S = 90.0
_SLOWER, _EACH_FAULT_S = 10.0, 90.0
"""A sitting may take this multiple of the undisturbed run's seconds, plus this for each fault."""

Kind = Literal["worker killed", "worker stopped", "driver killed"]


class Failure(Exception):  # noqa: N818 - what a trial looks for
    """The run hung, crashed, left processes, or wrote other texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Example: Fault(kind="worker killed", moment=0.4)
    """

    kind: Kind
    moment: float
    """Seconds after the start of its sitting, as a share of the undisturbed run's."""
    step: int = 0
    """It waits for so many steps of its sitting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run wrote."""

    rollouts: Mapping[tuple[int, str], Any]
    """Text, reward, policy version and logprob by step and request."""
    weights: str
    """SHA-256 of the last checkpoint's policy, and of its drafter."""


def faults(rng: random.Random) -> list[Fault]:
    """Return one fault of each kind in a random order, each at a random moment."""
    kinds: list[Kind] = ["worker killed", "worker stopped", "driver killed"]
    rng.shuffle(kinds)
    # A worker that hangs while it starts has ten minutes.
    return [Fault(kind=k, moment=rng.random(), step=int(k == "worker stopped")) for k in kinds]


def result_of(run: Path) -> Result:
    """Read what a run wrote. Raises Failure if a rollout is there twice."""
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    kept = ("text", "reward", "policy_version", "logprob")
    found = {(row["step"], row["request_id"]): tuple(row[name] for name in kept) for row in rows}
    if len(found) != len(rows):
        raise Failure(f"{len(rows) - len(found)} rollouts are logged twice")
    last = max((run / "checkpoints").glob("step_*"))
    digest = hashlib.sha256((last / "policy" / "model.safetensors").read_bytes())
    drafter = run / "drafter" / last.name / "tensors.safetensors"
    digest.update(drafter.read_bytes() if drafter.exists() else b"")
    return Result(rollouts=found, weights=digest.hexdigest())


def check_equal(found: Result, expected: Result) -> None:
    """Raise Failure if a run differs from the undisturbed one."""
    different = sorted(
        key
        for key in found.rollouts.keys() | expected.rollouts.keys()
        if found.rollouts.get(key) != expected.rollouts.get(key)
    )
    if different:
        raise Failure(f"{len(different)} rollouts differ, the first in step {different[0][0]}")
    if found.weights != expected.weights:
        raise Failure("the weights that the run ended with differ")


class Run:
    """A run in as many sittings as it takes; its files are under `place`."""

    def __init__(self, words: Sequence[str], place: Path) -> None:
        self.place = place
        self._words = [*words, f"--run.dir={place / 'run'}"]
        place.mkdir(parents=True)

    def finish(self, planned: Sequence[Fault], *, seconds: float) -> None:
        """Disturb the run until no fault is left, and let it end. `seconds` are its usual ones."""
        left = list(planned)
        deadline_s = _SLOWER * seconds + _EACH_FAULT_S * (len(left) + 1)
        for sitting in range(len(planned) + 2):
            log = self.place / f"log-{sitting}"
            driver = self._start(log)
            try:
                self._disturb(driver, log, left, seconds)
                code = driver.wait(deadline_s)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGABRT)  # faulthandler writes the stacks
                raise Failure(f"hang: not finished after {deadline_s:.0f} s") from None
            finally:
                driver.kill()
                driver.wait()
                outlived = self._end()
            said = log.read_text(errors="replace")
            if outlived:
                raise Failure(f"processes outlived the run: {outlived}")
            if "Traceback (most recent" in said:
                raise Failure(f"{log} shows a traceback")
            if code == 0:
                return
            if code != -signal.SIGKILL and SENTENCE not in said:
                raise Failure(f"the run ended with code {code}: {said[-200:]}")
        raise Failure(f"the run is not finished after {len(planned) + 2} sittings")

    def _start(self, log: Path) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
        with log.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-m", "longtail.cli.main", *self._words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | environment | {_MARK: str(self.place)},
                start_new_session=True,
            )

    def _disturb(
        self, driver: subprocess.Popen[bytes], log: Path, left: list[Fault], seconds: float
    ) -> None:
        """Make faults at their moments until the driver is killed or none is left."""
        began = time.monotonic()
        while left:
            fault = left.pop(0)
            due = began + fault.moment * seconds
            while (
                time.monotonic() < due
                or (fault.kind != "driver killed" and not self._workers())
                or len(_ENDED.findall(log.read_bytes())) < fault.step
            ):
                if driver.poll() is not None:
                    return
                time.sleep(0.01)
            if fault.kind == "driver killed":
                driver.kill()
                return
            number = signal.SIGKILL if fault.kind == "worker killed" else signal.SIGSTOP
            with suppress(ProcessLookupError):
                os.kill(random.Random(fault.moment).choice(self._workers()), number)
            began = time.monotonic()

    def _workers(self) -> list[int]:
        return [pid for pid, name in self._processes() if name.startswith("ray::Actor")]

    def _signal(self, number: int) -> None:
        for pid, _ in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _end(self) -> list[str]:
        """Wait for the last processes of the run; kill those that stay, and return them."""
        self._signal(signal.SIGCONT)
        deadline = time.monotonic() + _LEFTOVER_S
        while (left := list(self._processes())) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        return [name for _, name in left]

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yield pid and command of each process that carries the run's mark."""
        mark = f"{_MARK}={self.place}".encode()
        for place in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    name = (place / "cmdline").read_bytes().replace(b"\0", b" ")[:80]
                    yield int(place.name), name.decode(errors="replace").strip()


def words_of(place: Path) -> list[str]:
    """Return the words of a small run; builds its model and prompts in `place`."""
    return build(place).words(
        "unused",
        *("--run.steps=16", "--run.checkpoint_every=1", "--learner.dtype=float64"),
        *("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=150"),
        *("--cluster.workers=2", f"--cluster.worker_timeout_s={WORKER_TIMEOUT_S}"),
        *("--run.threads=2", "--speculation.drafter=fresh+history"),
    )


def main(words: Sequence[str] | None = None) -> int:
    """Make trials for some minutes; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0, help="begin trials for so long")
    parser.add_argument("--seed", type=int, default=0, help="of all faults")
    own = parser.parse_args(words)
    if native.layout(DTYPES["float32"]) is None:
        print("no native kernels here, so texts may depend on their batch: see `longtail doctor`")
        return 2
    place = Path(tempfile.mkdtemp(prefix="chaos-"))
    run_words, calm = words_of(place / "parts"), place / "undisturbed"
    began = time.monotonic()
    Run(run_words, calm).finish([], seconds=60.0)
    expected, seconds = result_of(calm / "run"), time.monotonic() - began
    end, number = time.monotonic() + 60 * own.minutes, 0
    while time.monotonic() < end:
        planned = faults(random.Random(f"{own.seed}/{number}"))
        shown = ", ".join(f"{fault.kind} at {fault.moment:.2f}" for fault in planned)
        try:
            trial = place / f"trial-{number}"
            Run(run_words, trial).finish(planned, seconds=seconds)
            check_equal(result_of(trial / "run"), expected)
        except Failure as failure:
            print(f"trial {number}: {shown}: FAILED: {failure}; kept in {place}", flush=True)
            return 1
        print(f"trial {number}: {shown}: equal", flush=True)
        shutil.rmtree(trial)
        number += 1
    shutil.rmtree(place)
    return 0


if __name__ == "__main__":
    sys.exit(main())
