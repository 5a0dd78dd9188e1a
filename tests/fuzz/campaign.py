"""Runs every fuzz target for minutes with new random seeds: `make fuzz`, `make fuzz MINUTES=2`.

A target is a function decorated with `@given` in tests/fuzz/test_fuzz_*.py. Targets take turns,
each in a forked process with a seed of its own, so that a crash or a hang is a failure, too.
A target that fails is not tried again: its file in .hypothesis/failures holds the seed, the minimal
example (of a crash or a hang, the case itself) and the traceback. The exit status is 1 if any
target failed.
"""

import argparse
import faulthandler
import functools
import importlib
import itertools
import os
import random
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis

TESTS = Path(__file__).resolve().parents[1]
FAILURES = TESTS.parent / ".hypothesis" / "failures"
CASES_A_TURN = 200
HANG_S = 120.0
"""A case that takes longer than this counts as a hang."""
MOST_OF_A_CASE = 100_000
"""Characters of a crashed or hung case that are kept."""


@dataclass(kw_only=True)
class Target:
    """A fuzz target and what became of it."""

    name: str
    test: Callable[[], None]
    cases: int = 0
    failure: str = ""
    """Reason of the failure; empty if there is none."""

    @property
    def log(self) -> Path:
        """File with the report of a failure."""
        return FAILURES / f"{self.name}.txt"

    @property
    def case(self) -> Path:
        """The arguments of the present case."""
        return FAILURES / f"{self.name}.case"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    minutes = parser.parse_args().minutes
    targets = load_targets()
    if not targets:
        print(f"{TESTS / 'fuzz'} holds no target")
        return 1
    FAILURES.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    for target in itertools.cycle(targets):
        tried = all(target.cases for target in targets)
        if all(target.failure for target in targets) or (tried and time.monotonic() >= end):
            break
        if not target.failure:
            take_turn(target)
            left = max(end - time.monotonic(), 0) / 60
            outcome = f", FAILED: {target.failure}" if target.failure else ""
            print(
                f"{left:5.1f} min left  {target.name}: {target.cases:,} cases{outcome}", flush=True
            )
    print("\n".join(["", *table(targets)]))
    return int(any(target.failure for target in targets))


def load_targets() -> list[Target]:
    """Import the fuzz targets; their settings are those in force at that moment."""
    sys.path.insert(0, str(TESTS))
    importlib.import_module("conftest")  # the environment of tests: no network, no accelerator
    hypothesis.settings.register_profile(
        "campaign",
        max_examples=CASES_A_TURN,
        deadline=None,
        derandomize=False,
        database=None,
        print_blob=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("campaign")
    return list(_targets())


def _targets() -> Iterator[Target]:
    for path in sorted((TESTS / "fuzz").glob("test_fuzz_*.py")):
        module = importlib.import_module(f"fuzz.{path.stem}")
        for name, test in vars(module).items():
            if name.startswith("test_") and hypothesis.is_hypothesis_test(test):
                yield Target(name=f"{path.stem}.{name}", test=test)


def take_turn(target: Target) -> None:
    """Try a number of cases in a process of their own; note how many, and how it ended."""
    seed = random.SystemRandom().getrandbits(64)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _be_child(target, seed, writing)
    os.close(writing)
    hung = False
    while True:
        if not select.select([reading], [], [], HANG_S)[0]:
            hung = True
            os.kill(child, signal.SIGABRT)  # faulthandler writes where it was
            break
        if not (beats := os.read(reading, 4096)):
            break
        target.cases += len(beats)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if hung:
        target.failure = f"a case took more than {HANG_S:.0f} s"
    elif status < 0:
        target.failure = f"ended by {signal.Signals(-status).name}"
    elif status:
        target.failure = target.log.read_text(errors="replace").splitlines()[-1][:100]
    else:
        target.log.unlink()
    if status < 0:
        with target.log.open("a") as log:
            log.write(f"\nthe case: {target.case.read_text(errors='replace')}\n")
    target.case.unlink(missing_ok=True)


def _be_child(target: Target, seed: int, beat: int) -> None:
    """Run the target once, a byte to `beat` for every case; never return."""
    log = os.open(target.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    print(f"{target.name}, hypothesis.seed({seed})", flush=True)
    faulthandler.enable()
    warnings.simplefilter("error")  # as pytest has it
    test: Any = target.test
    inner = test.hypothesis.inner_test

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> None:
        target.case.write_text(repr((args, kwargs))[:MOST_OF_A_CASE], errors="replace")
        os.write(beat, b".")
        inner(*args, **kwargs)

    test.hypothesis.inner_test = counted
    status = 0
    try:
        hypothesis.seed(seed)(test)()
    except BaseException as error:  # noqa: BLE001 - every failure is reported
        traceback.print_exc()
        reason = str(error).partition("\n")[0]
        print(f"\n{type(error).__name__}: {reason}")
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def table(targets: list[Target]) -> Iterator[str]:
    """List targets, cases and failures."""
    width = max(len(target.name) for target in targets)
    yield f"{'target':{width}}  {'cases':>10}  failures"
    for target in targets:
        told = f"1: {target.log}" if target.failure else "0"
        yield f"{target.name:{width}}  {target.cases:10,}  {told}"
    failed = sum(bool(target.failure) for target in targets)
    yield f"{'all':{width}}  {sum(target.cases for target in targets):10,}  {failed}"


if __name__ == "__main__":
    sys.exit(main())
