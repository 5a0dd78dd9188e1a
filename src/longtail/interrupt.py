"""Ctrl-C and SIGTERM as a polite request to stop, instead of a blow."""

import signal
from types import FrameType
from typing import final

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The user asked the run to stop; raised by `Interruption.check` only."""


@final
class Interruption:
    """Inside `with`, the first SIGINT or SIGTERM is only remembered; main thread only.

    The second one raises KeyboardInterrupt wherever the program is: they mean it.
    """

    def __init__(self) -> None:
        self._came = False
        self._before: list[signal._HANDLER] = []

    def __enter__(self) -> "Interruption":
        self._before = [signal.signal(number, self._receive) for number in _SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(_SIGNALS, self._before, strict=True):
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Interrupted if a signal came; call it only where stopping loses nothing."""
        if self._came:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            raise KeyboardInterrupt
        self._came = True
