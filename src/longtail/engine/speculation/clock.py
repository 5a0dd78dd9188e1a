"""The clock of the tuner's inputs. Its readings are logged, and can be replayed from the log."""

import abc
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import final


class StepClock(abc.ABC):
    """Clock of a step: `begin`, then any number of readings."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Begin a step."""

    @abc.abstractmethod
    def read(self) -> float:
        """Return the seconds since the step began."""


@final
class WallClock(StepClock):
    """The machine's clock."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began


@final
class ReplayClock(StepClock):
    """Repeats logged readings, so that a tuner repeats its decisions.

    Example: ReplayClock([[0.0001, 0.0004, 0.003], [0.002]]): a step with drafts, a plain one
    """

    def __init__(self, steps: Iterable[Sequence[float]]) -> None:
        self._steps = iter(steps)
        self._readings: Iterator[float] = iter(())

    def begin(self) -> None:
        """Go on to the next step. Raises StopIteration at the end of the log."""
        self._readings = iter(next(self._steps))

    def read(self) -> float:
        """Return the next reading. Raises StopIteration if the step had fewer."""
        return next(self._readings)


@final
class LoggingClock:
    """Reads a clock and keeps the readings of the present step."""

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self.readings: list[float] = []

    def begin(self) -> None:
        """Begin a step with no readings."""
        self._clock.begin()
        self.readings = []

    def read(self) -> float:
        """Return the seconds since the step began, and keep them."""
        reading = self._clock.read()
        self.readings.append(reading)
        return reading
