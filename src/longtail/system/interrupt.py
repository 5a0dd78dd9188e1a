"""Ctrl-C, SIGTERM and SIGHUP (the terminal is closed) as one request to stop."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final


class Interrupted(Exception):  # noqa: N818 - not an error: the user asked for it
    """The user asked the run to stop; raised by `Interruption.check` only."""


@contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Have all three raise KeyboardInterrupt wherever the program is, so that it ends in order.

    Outside the main thread nothing changes.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handled_by(receive):
        yield


@final
class Interruption:
    """Inside `with`, the first signal is only remembered; main thread only.

    The second one raises KeyboardInterrupt wherever the program is: they mean it.
    """

    def __init__(self) -> None:
        self.came = False
        """Whether a signal came."""
        self._handled = _handled_by(self._receive)

    def __enter__(self) -> "Interruption":
        self._handled.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.__exit__(None, None, None)

    def check(self) -> None:
        """Raise Interrupted if a signal came; call it only where stopping loses nothing."""
        if self.came:
            raise Interrupted

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.came:
            raise KeyboardInterrupt
        self.came = True


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have a handler called for the signals; SIGHUP stays ignored where it is, as under nohup."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    before = [signal.signal(number, handler) for number in signals]
    try:
        yield
    finally:
        for number, old in zip(signals, before, strict=True):
            signal.signal(number, old)
