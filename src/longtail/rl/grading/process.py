"""The parent's end of one grader process: start it, send tasks, receive results, end it.

Whatever the process does, each operation here is bounded, and its output is either the expected
message or a `ProtocolError`. `longtail.rl.grading.pool` assigns tasks.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from longtail.errors import JsonError
from longtail.rl.grading.grader import LENGTH, frame, one_line
from longtail.rl.grading.supervisor import SIGNALLED
from longtail.system.strict_json import parse_json

REAP_S = 10.0
"""Seconds to wait for the end of a killed process."""

MAX_MESSAGE = 1 << 20
"""Most bytes of a message; the longest has the errors of a group (`MAX_GROUP`), at most 12 bytes
per character as JSON."""

Outcome = float | str | list[float | str]
"""A reward, an error message, or one of the two for each completion of a group."""

_HOME = str(Path(__file__).parents[3])
"""Directory from which this package is imported."""

# NOTE: without -P, a json.py in the working directory would be imported.
_COMMAND = (
    sys.executable,
    "-u",
    "-P",
    "-c",
    "import sys; sys.path.append(sys.argv[1]); import json; "
    "from longtail.rl.grading.grader import serve; serve(**json.loads(sys.argv[2]))",
    _HOME,
)

_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals of users, schedulers and a kernel out of memory, which are not the reward's fault."""


class ProtocolError(Exception):
    """An unexpected message: something other than the grader wrote on its channel."""


@final
class GraderProcess:
    """One grader process and its tasks.

    starting --ready--> idle <--batch / last result--> busy; from any state --kill--> ended.
    Every operation is bounded: the socket does not block, and `kill` uses SIGKILL.
    """

    def __init__(
        self, reward_name: str, *, timeout_s: float, start_timeout_s: float, output: int
    ) -> None:
        self.socket, theirs = socket.socketpair()
        start = {"reward_name": reward_name, "path": _search_path()}
        with theirs:
            # Not multiprocessing, whose children import the parent's main module (and torch). In
            # its own session the process does not receive Ctrl-C.
            self._process = subprocess.Popen(
                [*_COMMAND, json.dumps(start)],
                stdin=theirs.fileno(),
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.socket.setblocking(False)
        self.ready = False
        self.begun = False
        self.closed = False
        self.refusal: str | None = None
        self.tasks: deque[int] = deque()
        self.deadline = time.monotonic() + start_timeout_s
        self._loading = False
        self._timeout_s = timeout_s
        self._received = bytearray()
        self._unsent = b""

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which ends with its grader."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Whether the grader is ready, alive and without a task."""
        return self.ready and not self.closed and not self.tasks

    @property
    def has_unsent(self) -> bool:
        """Whether part of the last batch is still to be sent."""
        return bool(self._unsent)

    def send_batch(self, numbers: Sequence[int], batch: bytes) -> None:
        """Send tasks; the grader must begin within the time limit of one task."""
        self.begun = False
        self.tasks.extend(numbers)
        self.deadline = time.monotonic() + self._timeout_s
        self._unsent = frame(batch)
        self.send()

    def send(self) -> None:
        """Send as much as the socket accepts without blocking."""
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # the grader is gone, which `receive` reports

    def receive(self) -> Iterator[tuple[int, Outcome]]:
        """Yield the finished tasks, each with its outcome.

        Sets `closed` if the grader is gone. Raises ProtocolError for an unexpected message.
        """
        try:
            part = self.socket.recv(1 << 16)
            self._received += part
            self.closed = not part
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        while len(self._received) >= LENGTH.size:
            length = LENGTH.unpack_from(self._received)[0]
            if length > MAX_MESSAGE:
                raise ProtocolError
            end = LENGTH.size + length
            if len(self._received) < end:
                return
            message = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            try:
                yield from self._handle(parse_json(message))
            except JsonError as error:
                raise ProtocolError from error

    def _handle(self, message: Any) -> Iterator[tuple[int, Outcome]]:
        match message:
            case {"loading": True} if not self._loading:
                self._loading = True
            case {"ready": True} if self._loading and not self.ready:
                self.ready = True
            case {"refused": str(why)} if not self.ready:
                self.refusal, self.closed = one_line(why), True
            case {"begun": True} if self.tasks and not self.begun:
                self.begun = True
                self._begin_task()
            case [int(number), float(reward), None] if self._is_current(number):
                self._begin_task(ended=number)
                yield number, reward
            case [int(number), list(each), None] if self._is_current(number):
                if not all(type(outcome) in (float, str) for outcome in each):
                    raise ProtocolError
                self._begin_task(ended=number)
                yield number, [one_line(one) if isinstance(one, str) else one for one in each]
            case [int(number), None, str(error)] if self._is_current(number):
                self._begin_task(ended=number)
                yield number, one_line(error)
            case _:
                raise ProtocolError

    def _is_current(self, number: int) -> bool:
        return self.begun and bool(self.tasks) and self.tasks[0] == number

    def _begin_task(self, ended: int | None = None) -> None:
        """Start the clock of the next task."""
        if ended is not None:
            self.tasks.popleft()
        self.deadline = time.monotonic() + self._timeout_s

    def hang_up(self) -> None:
        """Begin to end the process: its supervisor ends it when the channel is closed."""
        if not self._loading:
            with suppress(ProtocolError):
                list(self.receive())
        if not self._loading:  # before the reward's code runs, the supervisor may not exist
            self._process.kill()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> int | None:
        """End the process and all that it started; return its exit code, None if it lives on."""
        self.hang_up()
        self.socket.close()
        for _ in range(2):
            try:
                return self._process.wait(timeout=REAP_S)
            except subprocess.TimeoutExpired:  # SIGSTOP stopped the supervisor
                self._process.kill()
        return None


def describe_end(code: int | None) -> str:
    """Return the exit code that `GraderProcess.kill` returned in words.

    Example: describe_end(SIGNALLED + 9) == "was killed by SIGKILL"
    """
    if code is None:
        return f"does not end {REAP_S:g} s after SIGKILL"
    number = _killed_by(code)
    return f"was killed by {number.name}" if number else f"exited with status {code}"


def ended_from_outside(code: int | None) -> bool:
    """Return whether a signal ended the process that users, schedulers or the kernel send."""
    return code is not None and _killed_by(code) in _FROM_OUTSIDE


def _killed_by(code: int) -> signal.Signals | None:
    number = -code if code < 0 else code - SIGNALLED
    return signal.Signals(number) if number in set(signal.Signals) else None


def _search_path() -> list[str]:
    """Return the search path for rewards: sys.path with the working directory moved to its end."""
    here = os.getcwd()
    return [*(entry for entry in sys.path if os.path.realpath(entry or here) != here), here]
