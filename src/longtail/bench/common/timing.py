"""Timing of contestants in turns (A B A B ...), so that a slow minute falls on all of them."""

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of repeated measurements, with the extremes beside it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        assert values, "a spread needs at least one measurement"
        return Spread(median=statistics.median(values), low=min(values), high=max(values))

    def text(self, digits: int = 2, unit: str = "") -> str:
        """Render as `median (low-high)`."""
        low, high = f"{self.low:,.{digits}f}", f"{self.high:,.{digits}f}"
        return f"{self.median:,.{digits}f}{unit} ({low}-{high})"

    def numbers(self) -> dict[str, float]:
        """Return the three numbers for JSON."""
        return asdict(self)


def paired(
    functions: Mapping[str, Callable[[], float | None]], *, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """Run the contestants in turn, A B A B, and return the seconds of each run.

    A function that returns a float has timed itself (set-up excluded); one that returns None is
    timed from outside. The first `warmup` rounds are run and thrown away.

    Example: paired({"a": f, "b": g}, repeats=2, warmup=1) calls f g f g f g and keeps the last
    four: {"a": [0.10, 0.11], "b": [0.21, 0.20]}
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warmup + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            own = function()
            elapsed = time.perf_counter() - start if own is None else own
            if turn >= warmup:
                seconds[name].append(elapsed)
    return seconds


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Return the spread of the ratio taken within each pair of runs, so that drift cancels."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def pin(threads: int) -> list[int]:
    """Keep this process and its children on the last `threads` CPUs it may use; return them.

    The list is empty where the system cannot pin. To choose other CPUs, use `taskset`.
    """
    if sys.platform != "linux":
        return []
    cpus = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cpus)
    return cpus


def pinned(cpus: Sequence[int]) -> str:
    """Return the words of a card for `pin`'s result."""
    return f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"


def progress(bench: str) -> Log:
    """Return a function that prints lines of progress to stderr."""
    return lambda text: print(f"bench {bench}: {text}", file=sys.stderr, flush=True)
