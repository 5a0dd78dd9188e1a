"""The parent's end of one grader process: starting it, giving it tasks, hearing and ending it.

Whatever the process does, each operation here is bounded, and what arrives is either a message in
its turn or a `ProtocolError`. Who grades what belongs to `longtail.rl.grading.pool`.
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
"""How long a killed process may take to disappear."""

MAX_MESSAGE = 1 << 16
"""Bytes of a message; the longest holds an error, at most 12 bytes a character as JSON."""

_HOME = str(Path(__file__).parents[3])
"""Where this package is found."""

# NOTE: -P, for -c puts the working directory first, and a json.py there would be executed.
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
"""What ends a process that did nothing wrong: a user, a scheduler, the kernel without memory."""


class ProtocolError(Exception):
    """A grader said what no grader says at that point: something else writes on its channel."""


@final
class GraderProcess:
    """One grader process and the tasks it holds.

    starting --ready--> idle <--batch / last result--> busy; from anywhere --kill--> gone.
    Every operation on it is bounded: the socket does not block, and killing is SIGKILL.
    """

    def __init__(
        self, reward_name: str, *, timeout_s: float, start_timeout_s: float, output: int
    ) -> None:
        self.socket, theirs = socket.socketpair()
        start = {"reward_name": reward_name, "path": _reward_path()}
        with theirs:
            # Not multiprocessing: its children import the parent's main module (torch, and
            # whatever an unguarded script does). A session of its own keeps Ctrl-C from it.
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
        """The id of the process that supervises the grader and ends with it."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Ready, alive and without a task."""
        return self.ready and not self.closed and not self.tasks

    @property
    def has_unsent(self) -> bool:
        """Whether part of the last batch waits for the socket to take it."""
        return bool(self._unsent)

    def give(self, numbers: Sequence[int], batch: bytes) -> None:
        """Hand over tasks, to be begun within the time limit of one."""
        self.begun = False
        self.tasks.extend(numbers)
        self.deadline = time.monotonic() + self._timeout_s
        self._unsent = frame(batch)
        self.send()

    def send(self) -> None:
        """Send as much as the socket takes."""
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # it is gone: receiving reports that

    def receive(self) -> Iterator[tuple[int, float | str]]:
        """Yield the tasks that have ended, each with its reward or what went wrong.

        Sets `closed` where the grader is gone. Raises ProtocolError for whatever else it says.
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
                yield from self._take(parse_json(message))
            except JsonError as error:
                raise ProtocolError from error

    def _take(self, message: Any) -> Iterator[tuple[int, float | str]]:
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
            case [int(number), float(reward), None] if self._is_at(number):
                self._begin_task(ended=number)
                yield number, reward
            case [int(number), None, str(error)] if self._is_at(number):
                self._begin_task(ended=number)
                yield number, one_line(error)
            case _:
                raise ProtocolError

    def _is_at(self, number: int) -> bool:
        return self.begun and bool(self.tasks) and self.tasks[0] == number

    def _begin_task(self, ended: int | None = None) -> None:
        """Start the clock of the next task."""
        if ended is not None:
            self.tasks.popleft()
        self.deadline = time.monotonic() + self._timeout_s

    def hang_up(self) -> None:
        """Begin to end the process: its supervisor takes this for our end."""
        if not self._loading:
            with suppress(ProtocolError):
                list(self.receive())
        if not self._loading:  # nothing of the reward has run, and the supervisor may not listen
            self._process.kill()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def kill(self) -> int | None:
        """End the process and all it started; return how it had ended, None where it goes on."""
        self.hang_up()
        self.socket.close()
        for _ in range(2):
            try:
                return self._process.wait(timeout=REAP_S)
            except subprocess.TimeoutExpired:  # the supervisor was stopped
                self._process.kill()
        return None


def how_it_ended(code: int | None) -> str:
    """Put into words what `GraderProcess.kill` returned.

    Example: how_it_ended(SIGNALLED + 9) == "was killed by SIGKILL"
    """
    if code is None:
        return f"does not end {REAP_S:g} s after SIGKILL"
    number = _killed_by(code)
    return f"was killed by {number.name}" if number else f"exited with status {code}"


def ended_from_outside(code: int | None) -> bool:
    """Tell whether it ended by a signal that users, schedulers and a kernel out of memory send."""
    return code is not None and _killed_by(code) in _FROM_OUTSIDE


def _killed_by(code: int) -> signal.Signals | None:
    number = -code if code < 0 else code - SIGNALLED
    return signal.Signals(number) if number in set(signal.Signals) else None


def _reward_path() -> list[str]:
    """Return where a reward is looked for: the working directory, wherever it stood, comes last."""
    here = os.getcwd()
    return [*(entry for entry in sys.path if os.path.realpath(entry or here) != here), here]
