"""Forwarding of graders' output to stderr, up to a limit."""

import os
import threading
from contextlib import suppress
from typing import final

MAX_SHOWN = 16_384
"""Bytes forwarded between two calls of `reset_limit`."""

_CLOSING_S = 1.0
"""Seconds that `close` waits for the last output."""


@final
class OutputForwarder:
    """Reads what processes write to `writer`, a pipe, and forwards the beginning to stderr.

    A thread reads to the end, so no process waits for space in the pipe.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._remaining, self._is_cut = MAX_SHOWN, False
        self._thread = threading.Thread(target=self._read, name="graders' output", daemon=True)
        self._thread.start()

    def reset_limit(self) -> None:
        """Forward MAX_SHOWN bytes from here on."""
        self._remaining, self._is_cut = MAX_SHOWN, False

    def close(self) -> None:
        """Forward the last output; the processes must have ended."""
        os.close(self.writer)
        self._thread.join(_CLOSING_S)

    def _read(self) -> None:
        while part := os.read(self._reader, 1 << 16):
            shown = part[: self._remaining]
            self._remaining -= len(shown)
            _write(shown)
            if len(part) > len(shown) and not self._is_cut:
                self._is_cut = True
                _write(b"\n(longtail: the reward prints more; it is not shown)\n")
        os.close(self._reader)


def _write(part: bytes) -> None:
    with suppress(OSError):  # stderr may be closed
        while part:
            part = part[os.write(2, part) :]
