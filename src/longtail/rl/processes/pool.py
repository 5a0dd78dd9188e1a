"""Processes that run a user's code, each killed with its descendants.

    begin(key, method, ...) --> answers(): (key, value) --> ask(key, method, ...) ... --> end(key)

An answer may be a sentence instead: why there is none. No process is trusted: its answers are JSON
of bounded size and known types. A confined one has namespaces of its own where Linux permits.
"""

import functools
import math
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from longtail.errors import ConfigError, GradingError
from longtail.rl.processes.process import MAX_FILE_BYTES, Program
from longtail.system import machine

_LOADING_S = 120.0
"""Most seconds in which a process loads its code."""
_KILLING_S = 10.0
"""Most seconds in which a keeper kills."""
_MAX_ANSWER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Answer:
    value: Any = None
    error: Annotated[str, Field(max_length=10_000)] | None = None


_ANSWER = TypeAdapter(_Answer)


@functools.cache
def _namespaces(network: bool) -> tuple[tuple[str, ...], str]:
    """Return the command that starts another in namespaces of its own, or why there is none."""
    command = ["unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child"]
    command += [] if network else ["--net"]
    problem = ""
    for each in ([*command, "--mount-proc"], command):
        try:
            subprocess.run([*each, "true"], capture_output=True, text=True, check=True)
            return tuple(each), ""
        except subprocess.CalledProcessError as error:
            problem = " ".join(error.stderr.split())
        except OSError as error:
            problem = str(error)
    return (), problem


def confinement(*, network: bool = False) -> list[str]:
    """Return sentences about what confines environments on this machine, and what does not."""
    command, problem = _namespaces(network)
    memory = " and no more memory than is free" if sys.platform == "linux" else ""
    reached = [*(["the network"] if network or not command else []), "all files of this user"]
    found = [
        f"environments run in processes that are killed with their children; each has a scratch "
        f"folder, files of at most {MAX_FILE_BYTES >> 30} GiB{memory}",
        f"environments reach {' and '.join(reached)}",
    ]
    if not command:
        found.append(f"environments reach all processes of this user: no namespaces ({problem})")
    return found


class _Process:
    """One process, idle or in use, that answers one question at a time."""

    def __init__(self, program: Program) -> None:
        path = f"import sys; sys.path[:] = {machine.module_path()};"
        self.pipe, theirs = socket.socketpair()
        self.pipe.setblocking(False)  # a process may read and write when it likes, or never
        self._unsent, self._received = memoryview(b""), bytearray()
        with theirs:
            self.keeper = subprocess.Popen(
                [
                    *(_namespaces(program.network)[0] if program.is_confined else ()),
                    *(sys.executable, "-c"),
                    f"{path} from longtail.rl.processes import process; "
                    f"process.main({theirs.fileno()}, process.{program})",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that of this process belongs to the run
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self._loading_s = _LOADING_S  # 0 once it is loaded
        self._asked, self.limit_s = 0.0, math.inf
        self._kind: TypeAdapter | None = None
        self._unsendable = ""
        """Why the question could not be sent."""
        self.left_s = math.inf
        """Seconds that its user may still take here."""

    @property
    def deadline(self) -> float:
        """Time after which an answer is too late; infinite if none is awaited."""
        return self._asked + self.limit_s + self._loading_s

    def ask(self, kind: TypeAdapter, limit_s: float, *question: Any) -> None:
        """Begin to send a question; `receive` sends the rest."""
        self._kind, self._unsendable = kind, ""
        self._asked, self.limit_s = time.monotonic(), min(limit_s, self.left_s)
        try:
            self._unsent = memoryview(pickle.dumps(question))
        except Exception as error:  # noqa: BLE001 - pickling a row runs methods of its values
            self._unsendable = f"the row cannot be sent: {error}"
        self._send()

    def receive(self) -> _Answer | str | None:
        """Return an answer, or why none will come; None if there is none yet."""
        if self._unsendable:
            problem, self._unsendable = self._unsendable, ""
            self.limit_s, self._kind = math.inf, None
            return _Answer(error=problem)
        try:
            self._send()
            if self._receive_line() and (answer := self._answer()):
                return answer
        except (EOFError, ConnectionError):
            return self._ending()
        except (ValueError, GradingError):
            return f"its output is not an answer of at most {_MAX_ANSWER_BYTES >> 20} MiB"
        if time.monotonic() < self.deadline:
            return None
        rest = " (the rest of its episode's time)" if self.limit_s == self.left_s else ""
        return f"it gave no answer in {self.limit_s:.3g} s{rest} and was killed"

    def _answer(self) -> _Answer | None:
        """Return the line that has come, None if it says that the code is loaded.

        Raises ValueError or GradingError for one that the question does not allow.
        """
        found, now = _ANSWER.validate_json(bytes(self._received)), time.monotonic()
        self._received.clear()
        if self._loading_s and found.error is None:
            self._loading_s, self._asked = 0.0, now
            self._send()
            return None
        if self._kind is None:
            raise ValueError("nothing was asked")
        value = None if found.error is not None else self._kind.validate_python(found.value)
        self.left_s -= now - self._asked
        self._loading_s, self.limit_s, self._kind = 0.0, math.inf, None
        return _Answer(value, found.error)

    @property
    def events(self) -> int:
        """Events to wait for, as `select.poll` takes them."""
        is_sending = self._unsent and not self._loading_s
        return select.POLLIN | (select.POLLOUT if is_sending else 0)

    def _send(self) -> None:
        with suppress(OSError):  # it has not read yet, or has ended, as its answers show
            while self._unsent and not self._loading_s:
                self._unsent = self._unsent[self.pipe.send(self._unsent) :]

    def _receive_line(self) -> bool:
        """Read what has come; return whether it is a whole line."""
        with suppress(BlockingIOError):
            while not self._received.endswith(b"\n"):
                if len(self._received) > _MAX_ANSWER_BYTES:
                    raise ValueError("too long")
                if not (data := self.pipe.recv(2**20)):
                    raise EOFError
                self._received += data
        return self._received.endswith(b"\n")

    def _ending(self) -> str:
        try:
            status = self.keeper.wait(1.0)  # the last that has the pipe
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        name = {128 + each: each.name for each in signal.Signals}.get(status)
        return f"it was killed by {name}" if name else f"it exited with status {status}"

    def wait(self) -> None:
        """Wait for the end of a process whose pipe is closed."""
        try:
            self.keeper.wait(_KILLING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.keeper.pid, signal.SIGKILL)
            self.keeper.wait()


class ProcessPool(AbstractContextManager[Any]):
    """Processes of one program, of which at most `most` are in use; for use by one thread.

    `kinds` has the types that each method of the program may return. `call_s` limits the seconds
    of an answer, `total_s` those of all answers from `begin` to `end`. A process that exceeds
    either is killed. The constructor starts one process, which loads the program. `close` ends all.
    """

    def __init__(
        self,
        program: Program,
        kinds: Mapping[str, Any],
        *,
        most: int,
        call_s: float,
        total_s: float = math.inf,
    ) -> None:
        self._program = program
        self._kinds = {method: TypeAdapter(kind) for method, kind in kinds.items()}
        self._most, self._call_s, self._total_s = most, call_s, total_s
        self._running: dict[str, _Process] = {}
        self._killed: list[_Process] = []
        self._idle = [self._new()]

    def __exit__(self, *error: object) -> None:
        self.close()

    def first(self, method: str, *arguments: Any) -> Any:
        """Return an answer. Raises ConfigError with the reason if the program cannot be loaded."""
        assert not self._running, "asked before all others"
        process = self._running[""] = self._take()
        process.ask(self._kinds[method], _LOADING_S, method, *arguments)
        while not (found := self.answers(_LOADING_S)):
            pass
        self.end("")
        ((_, answer),) = found
        if isinstance(answer, str):
            raise ConfigError(answer)
        return answer

    @property
    def num_free(self) -> int:
        """Number of processes that may be used further."""
        return self._most - len(self._running)

    def begin(self, key: str, method: str, *arguments: Any) -> None:
        """Use a process, and ask it."""
        assert self.num_free > 0, "as many run as may"
        process = self._running[key] = self._take()
        process.left_s = self._total_s
        self.ask(key, method, *arguments)

    def ask(self, key: str, method: str, *arguments: Any) -> None:
        """Ask a process that is used."""
        self._running[key].ask(self._kinds[method], self._call_s, method, *arguments)

    def end(self, key: str) -> None:
        """Free a process; it is killed if its answer is still awaited."""
        process = self._running.pop(key, None)
        if process is not None and process.deadline < math.inf:
            self._kill(process)
        elif process is not None:
            self._idle.append(process)

    def answers(self, timeout_s: float) -> list[tuple[str, Any]]:
        """Return the answers that have come; wait for the first until the time is over.

        A text is why there is none.
        """
        end = time.monotonic() + timeout_s
        while True:
            found = list[tuple[str, Any]]()
            asked = {key: each for key, each in self._running.items() if each.deadline < math.inf}
            for key, process in asked.items():
                answer = process.receive()
                if isinstance(answer, _Answer):
                    found.append((key, answer.value if answer.error is None else answer.error))
                elif answer is not None:
                    del self._running[key]
                    self._kill(process)
                    found.append((key, f"{self._program.field}: {answer}"))
            now = time.monotonic()
            if found or now >= end:
                return found
            poll = select.poll()
            for each in asked.values():
                poll.register(each.pipe, each.events)
            wait_s = min([end, *(each.deadline for each in asked.values())]) - now
            poll.poll(math.ceil(max(0.0, wait_s) * 1000))

    def close(self) -> None:
        """End all processes; closing twice has no effect."""
        for process in [*self._running.values(), *self._idle]:
            self._kill(process)
        self._running, self._idle = {}, []
        while self._killed:
            self._killed.pop().wait()

    def _take(self) -> _Process:
        """Return an idle process that lives, or a new one."""
        while self._idle:
            process = self._idle.pop()
            if process.receive() is None:
                return process
            self._kill(process)
        return self._new()

    def _new(self) -> _Process:
        self._killed = [each for each in self._killed if each.keeper.poll() is None]
        return _Process(self._program)

    def _kill(self, process: _Process) -> None:
        process.pipe.close()  # for its keeper to kill it
        self._killed.append(process)
