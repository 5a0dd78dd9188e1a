"""Ctrl-C and SIGTERM as a question that the loop asks where it may stop, instead of a blow."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The user asked the run to stop; raised by `Interruption.check` only."""


class Interruption:
    """Remembers that a signal came."""

    def __init__(self) -> None:
        self._came = False

    def check(self) -> None:
        """Raise Interrupted if a signal came; call it only where stopping loses nothing."""
        if self._came:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._came:  # the second time they mean it
            raise KeyboardInterrupt
        self._came = True


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a flag while inside; main thread only."""
    interruption = Interruption()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interruption._receive) for number in numbers]
    try:
        yield interruption
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
