"""Handling of Ctrl-C, SIGTERM and SIGHUP (a closed terminal) as one request to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import final


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The user asked the run to stop; raised only by `Interruption.check`."""


def signals_as_ctrl_c() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on all three signals inside the context.

    Outside the main thread this does nothing.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handled_by(receive)


@final
class Interruption:
    """A context in which the first signal is only recorded; the second raises KeyboardInterrupt.

    Outside the main thread it does nothing.
    """

    def __init__(self) -> None:
        self.received = False
        """Whether a signal has arrived."""
        self._handled = _handled_by(self._receive)

    def __enter__(self) -> "Interruption":
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def check(self) -> None:
        """Raise Interrupted if a signal has arrived; call it where stopping loses no work."""
        if self.received:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install a handler of the signals; SIGHUP stays ignored if it is, as under nohup.

    Outside the main thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    before = [signal.signal(number, handler) for number in signals]
    try:
        yield
    finally:
        for number, old in zip(signals, before, strict=True):
            signal.signal(number, old)
