"""Seconds of an engine step, by part."""

import time
from collections.abc import Sequence
from typing import TypedDict, final

from longtail.speculation.drafter import Drafter


class StepSeconds(TypedDict):
    """Seconds of one step, under the names that `StepReport` gives them."""

    step_s: float
    forward_s: float
    sample_s: float
    gap_s: float
    draft_s: float
    draft_forward_s: float
    tuner_s: float


class StepClock:
    """The clock of the tuner's inputs; tests replace it."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began


@final
class Stopwatch:
    """Context manager that sums the seconds spent inside it."""

    __slots__ = ("_entered", "seconds")

    def __init__(self) -> None:
        self.seconds = self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._entered


@final
class StepTimer:
    """Stopwatches of one step; `start` resets them for the next one.

        schedule | draft | flatten | launch, feedback, wait | accept | append | record
                   draft             compute (feedback: draft) draft             draft

    Time of `noise` and `tuner` is part of the time of `draft`, and reported separately.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.draft, self.compute = Stopwatch(), Stopwatch()
        self.noise, self.tuner = Stopwatch(), Stopwatch()
        self._drafters = drafters
        self._started = self._forward_before = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.draft.seconds = self.compute.seconds = 0.0
        self.noise.seconds = self.tuner.seconds = 0.0
        self._forward_before = sum(drafter.forward_s for drafter in self._drafters)
        self._started = time.perf_counter()

    def stop(self, *, forward_s: float, sample_s: float) -> StepSeconds:
        """Return the seconds of the step, given those that the model runner measured."""
        step_s = time.perf_counter() - self._started
        forwards_s = sum((each.forward_s for each in self._drafters), 0.0) - self._forward_before
        noise_s, tuner_s = self.noise.seconds, self.tuner.seconds
        return {
            "step_s": step_s,
            "forward_s": forward_s,
            "sample_s": sample_s + noise_s,
            "gap_s": step_s - self.compute.seconds - forwards_s,
            "draft_s": self.draft.seconds - noise_s - tuner_s if self._drafters else 0.0,
            "draft_forward_s": forwards_s,
            "tuner_s": tuner_s,
        }
