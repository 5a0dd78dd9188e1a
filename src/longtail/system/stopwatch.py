"""A stopwatch for the sections of a step."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

Clock = Callable[[], float]
"""Seconds since any fixed moment; tests replace it."""


@final
class Stopwatch:
    """Seconds of each section since the last `lap`; repeated sections are summed.

    Example: with watch.section("rollout"): ...
             watch.lap() == {"rollout": 6.2, "step": 8.0}     step is all time since the last lap
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._start = clock()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to a section, also after an exception."""
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds[name] += self._clock() - begin

    def lap(self) -> dict[str, float]:
        """Return the seconds of each section and of the whole step, and restart."""
        now = self._clock()
        seconds = {**self._seconds, "step": now - self._start}
        self._seconds.clear()
        self._start = now
        return seconds
