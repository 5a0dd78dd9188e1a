"""Environments of running episodes, each in a process that is killed with its descendants.

    begin(key, row, seed) --> answers(): (key, Reply) --> step(key, text) --> ... --> end(key)

An answer may be a sentence instead: why the episode has no reward. No process is trusted: its
answers are JSON of bounded size. Where Linux permits, it has namespaces of its own.
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
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Annotated, Any, final

from pydantic import AfterValidator, Field, TypeAdapter

from longtail.errors import ConfigError, GradingError
from longtail.rl.environments.process import MAX_FILE_BYTES
from longtail.rl.environments.records import Reply, is_message
from longtail.rl.grading.answers import checked_number
from longtail.system import machine

_LOADING_S = 120.0
"""Most seconds in which a process loads its environment."""
_KILLING_S = 10.0
"""Most seconds in which a keeper kills."""
_MAX_ANSWER_BYTES = 64 * 2**20


def _checked(reply: Reply) -> Reply:
    """Return a reply; ValueError for one that no session makes: the environment forged it."""
    checked_number(reply.reward, source="it")
    are_counts = 0 <= reply.bad_calls <= reply.calls < 2**31
    if not are_counts or not all(is_message(each) for each in reply.messages):
        raise ValueError("its messages or its numbers of calls are forged")
    return reply


@dataclass(frozen=True, slots=True)
class _Answer:
    reply: Annotated[Reply, AfterValidator(_checked)] | None = None
    tools: list[dict[str, Any]] | None = None
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


@final
class _Process:
    """One process, idle or with an episode, that answers one question at a time."""

    def __init__(
        self, session: tuple[str, Sequence[str], str], modules: Sequence[str], *, network: bool
    ) -> None:
        path = [*(own := machine.module_path()), *(each for each in modules if each not in own)]
        program = f"import sys; sys.path[:] = {path}; from longtail.rl.environments import process;"
        self.pipe, theirs = socket.socketpair()
        self.pipe.setblocking(False)  # a process may read and write when it likes, or never
        self.unsent, self._received = memoryview(b""), bytearray()
        with theirs:
            self.keeper = subprocess.Popen(
                [
                    *(*_namespaces(network)[0], sys.executable, "-c"),
                    f"{program} process.main({theirs.fileno()}, {session})",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # that of this process belongs to the run
                pass_fds=[theirs.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        self._loading_s = _LOADING_S
        self._asked, self.limit_s = 0.0, math.inf
        self.left_s = math.inf
        """Seconds that the episode may still take here."""

    @property
    def deadline(self) -> float:
        """Time after which an answer is too late; infinite if none is awaited."""
        return self._asked + self.limit_s + self._loading_s

    def ask(self, limit_s: float, *question: Any) -> None:
        """Begin to send a question; `receive` sends the rest. Raises the errors of pickle."""
        self.unsent = memoryview(pickle.dumps(question))
        self._asked, self.limit_s = time.monotonic(), min(limit_s, self.left_s)
        self._send()

    def receive(self) -> _Answer | str | None:
        """Return an answer, or why none will come; None if there is none yet."""
        try:
            self._send()
            if self._receive_line():
                answer = _ANSWER.validate_json(bytes(self._received))
                self._received.clear()
                self.left_s -= 0.0 if self._loading_s else time.monotonic() - self._asked
                self._loading_s, self.limit_s = 0.0, math.inf
                return answer
        except (EOFError, ConnectionError):
            return self._ending()
        except (ValueError, GradingError):
            return f"it wrote what is no answer of at most {_MAX_ANSWER_BYTES >> 20} MiB"
        if time.monotonic() < self.deadline:
            return None
        rest = " (the rest of its episode's time)" if self.limit_s == self.left_s else ""
        return f"it gave no answer in {self.limit_s:.3g} s{rest} and was killed"

    def _send(self) -> None:
        with suppress(OSError):  # it has not read yet, or has ended, as its answers show
            while self.unsent:
                self.unsent = self.unsent[self.pipe.send(self.unsent) :]

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


@final
class Environments(AbstractContextManager["Environments"]):
    """Environments of one kind, for at most `most` episodes at a time; for use by one thread.

    `call_s` limits the seconds of each answer, `episode_s` those of all answers of an episode; the
    time of the model does not count. A process that exceeds either is killed. `network` lets
    environments reach the network. `modules` are more folders of modules. `close` ends all.
    """

    def __init__(  # noqa: PLR0913 - all by keyword, but for what is run
        self,
        name: str,
        tools: Sequence[str],
        calls: str,
        *,
        most: int,
        call_s: float,
        episode_s: float,
        network: bool = False,
        modules: Sequence[str] = (),
    ) -> None:
        self._session, self._network = (name, tuple(tools), calls), network
        self._modules = modules
        self._most, self._call_s, self._episode_s = most, call_s, episode_s
        self._running: dict[str, _Process] = {}
        self._idle: list[_Process] = []
        self._killed: list[_Process] = []
        self._failed: list[tuple[str, Reply | str]] = []
        """Answers of episodes whose question could not be sent."""

    def __exit__(self, *error: object) -> None:
        self.close()

    @functools.cached_property
    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the tools for the chat template, from a process started for it.

        Raises ConfigError with the reason if the environment cannot be loaded.
        """
        process = self._process()
        process.ask(_LOADING_S, "tools")
        while (answer := process.receive()) is None:
            _wait([process], 1.0)
        if isinstance(answer, _Answer) and answer.tools is not None:
            self._idle.append(process)
            return answer.tools
        self._kill(process)
        known = isinstance(answer, _Answer) and answer.error
        raise ConfigError(known or f"environment.name = {self._session[0]!r}: {answer}")

    @property
    def num_free(self) -> int:
        """Episodes that can begin now."""
        return self._most - len(self._running)

    def begin(self, key: str, row: Mapping[str, Any], seed: int) -> None:
        """Begin an episode; the answer is that of the environment's `reset`."""
        assert self.num_free > 0, "as many episodes run as may"
        process = self._idle.pop() if self._idle else self._process()
        process.left_s = self._episode_s
        self._running[key] = process
        self._ask(key, "reset", dict(row), seed)

    def step(self, key: str, text: str) -> None:
        """Give the environment a text of the model to answer."""
        self._ask(key, "step", text)

    def finish(self, key: str) -> None:
        """Ask for the reward of an episode that is cut."""
        self._ask(key, "finish")

    def end(self, key: str) -> None:
        """Free the place of an episode; its process is killed if its answer is still awaited."""
        self._failed = [each for each in self._failed if each[0] != key]
        process = self._running.pop(key, None)
        if process is not None and process.deadline < math.inf:
            self._kill(process)
        elif process is not None:
            self._idle.append(process)

    def answers(self, timeout_s: float) -> list[tuple[str, Reply | str]]:
        """Return the answers that have come; wait for the first until the time is over.

        A text is why the episode has no reward.
        """
        end = time.monotonic() + timeout_s
        while True:
            found, self._failed = self._failed, []
            asked = {key: each for key, each in self._running.items() if each.deadline < math.inf}
            for key, process in asked.items():
                answer = process.receive()
                if isinstance(answer, _Answer) and (content := answer.reply or answer.error):
                    found.append((key, content))
                elif answer is not None:
                    del self._running[key]
                    self._kill(process)
                    found.append((key, f"the environment failed: {answer}"))
            for process in [each for each in self._idle if each.receive() is not None]:
                self._idle.remove(process)  # it has ended by itself
                self._kill(process)
            now, processes = time.monotonic(), [*asked.values(), *self._idle]
            if found or now >= end:
                return found
            _wait(processes, min([end, *(each.deadline for each in processes)]) - now)

    def close(self) -> None:
        """End all processes; closing twice has no effect."""
        for process in [*self._running.values(), *self._idle]:
            self._kill(process)
        self._running, self._idle = {}, []
        while self._killed:
            self._killed.pop().wait()

    def _process(self) -> _Process:
        self._killed = [each for each in self._killed if each.keeper.poll() is None]
        return _Process(self._session, self._modules, network=self._network)

    def _kill(self, process: _Process) -> None:
        process.pipe.close()  # for its keeper to kill it
        self._killed.append(process)

    def _ask(self, key: str, *question: Any) -> None:
        try:
            self._running[key].ask(self._call_s, *question)
        except Exception as error:  # noqa: BLE001 - pickling a row runs methods of its values
            self._failed.append((key, f"the row cannot be sent to its environment: {error}"))


def _wait(processes: Sequence[_Process], timeout_s: float) -> None:
    """Wait until one of the processes writes, ends, or reads the rest of a question."""
    poll = select.poll()
    for each in processes:
        poll.register(each.pipe, select.POLLIN | (select.POLLOUT if each.unsent else 0))
    poll.poll(math.ceil(max(0.0, timeout_s) * 1000))
