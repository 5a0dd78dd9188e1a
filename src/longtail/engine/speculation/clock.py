"""The clock that tuners go by: it can be faked, and played back from the log of a run."""

import abc
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import final


class StepClock(abc.ABC):
    """Tells how far a step is; `begin`, then some readings, step by step."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a step."""

    @abc.abstractmethod
    def read(self) -> float:
        """Seconds since the step began."""


@final
class WallClock(StepClock):
    """The machine's own."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def read(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self._began


@final
class ReplayClock(StepClock):
    """Says again what was read before, so that a tuner decides again what it decided.

    Example: ReplayClock([[0.0001, 0.0004, 0.003], [0.002]]): a step that drafted, a plain one
    """

    def __init__(self, steps: Iterable[Sequence[float]]) -> None:
        self._steps = iter(steps)
        self._readings: Iterator[float] = iter(())

    def begin(self) -> None:
        """Go on to the next step. Raises StopIteration at the end of the log."""
        self._readings = iter(next(self._steps))

    def read(self) -> float:
        """Repeat the next reading. Raises StopIteration if the step had fewer."""
        return next(self._readings)
