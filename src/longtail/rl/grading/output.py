"""What graders print: shown on the terminal up to a bound, read to the end all the same."""

import os
import threading
from contextlib import suppress
from typing import final

MAX_SHOWN = 16_384
"""Bytes shown between two calls of `renew`."""

_CLOSING_S = 1.0
"""How long the end of what was printed may take to arrive."""


@final
class Printed:
    """Reads what is written to `writer`, a pipe's end for processes, and shows its beginning.

    A thread of its own reads, so that no process waits for room in the pipe.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._room, self._cut = MAX_SHOWN, False
        self._thread = threading.Thread(target=self._read, name="graders' output", daemon=True)
        self._thread.start()

    def renew(self) -> None:
        """Show MAX_SHOWN bytes from here on."""
        self._room, self._cut = MAX_SHOWN, False

    def close(self) -> None:
        """Show what was printed until now; call it when the processes have ended."""
        os.close(self.writer)
        self._thread.join(_CLOSING_S)

    def _read(self) -> None:
        while part := os.read(self._reader, 1 << 16):
            shown = part[: self._room]
            self._room -= len(shown)
            _show(shown)
            if len(part) > len(shown) and not self._cut:
                self._cut = True
                _show(b"\n(longtail: the reward prints more; it is not shown)\n")
        os.close(self._reader)


def _show(part: bytes) -> None:
    with suppress(OSError):  # nobody reads our stderr
        while part:
            part = part[os.write(2, part) :]
