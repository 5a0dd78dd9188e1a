"""Timing of contestants in turns (A B A B ...), so that a slow minute falls on all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import final

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median of repeated measurements, with the extremes beside it.

    Example: Spread(median=2.0, low=1.9, high=2.4)
    """

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> "Spread":
        """Summarise at least one measurement."""
        assert values, "a spread needs at least one measurement"
        return Spread(median=statistics.median(values), low=min(values), high=max(values))

    def scaled(self, factor: float) -> "Spread":
        """Multiply by a positive factor (a change of unit)."""
        return Spread(median=self.median * factor, low=self.low * factor, high=self.high * factor)

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


@final
class CpuClock:
    """CPU seconds and seconds of the blocks inside `with clock`, for a process of one thread."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0

    def __enter__(self) -> None:
        self._wall -= time.perf_counter()
        self._cpu -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self._wall += time.perf_counter()
        self._cpu += time.process_time()

    def share(self) -> float:
        """CPU seconds over seconds: below 1, another process had the core."""
        return self._cpu / self._wall if self._wall else 1.0


def pin_threads(threads: int) -> None:
    """Limit torch's compute threads in this process; 0 keeps the default."""
    if threads > 0:
        torch.set_num_threads(threads)
