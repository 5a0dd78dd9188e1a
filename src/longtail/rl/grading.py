"""Grading completions in processes that can be killed.

Owns the grader processes (`longtail.rl.grader`), the time limit of each completion, and what
becomes of one whose grader raises, hangs, dies or answers nonsense: a `GradingFailure`, never a
reward of 0. Rewards themselves belong to `longtail.rl.reward`.

    pending tasks --batch--> worker 1: t0 t1 [t2] t3      t2 hangs: worker 1 is killed, t2 fails,
                  --batch--> worker 2: t4 [t5] t6         t3 is pending again, a new worker starts

Results arrive one by one, so the clock of a task starts when the one before it has ended.
"""

import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, final

from longtail.errors import ConfigError, DataError, GradingError
from longtail.rl.grader import LENGTH, frame
from longtail.rl.reward import required_columns, reward_factory
from longtail.types import Completion, GradingFailure, Prompt, Rollout

MAX_BATCH = 64
"""Tasks in one message to a grader."""

MAX_FAILED_STARTS = 3
"""Times that each grader may die in a row before it has begun to grade, until all is given up."""

REAP_S = 10.0
"""How long a killed process may take to disappear."""

_CHILD = (
    "import json, sys; start = json.loads(sys.argv[1]); sys.path[:] = start['path']; "
    "from longtail.rl.grader import serve; serve(start['reward'], start['timeout_s'])"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """What became of a list of completions: each is in exactly one place, in input order.

    Example: of 3 completions, the second of which hung its grader:
        Graded(rollouts=(first, third), failures=(GradingFailure(..., error="no result in 10 s"),))
    """

    rollouts: tuple[Rollout, ...]
    failures: tuple[GradingFailure, ...]


@final
class _Worker:
    """One grader process and the tasks it holds.

    starting --ready--> idle <--batch / last result--> busy; from anywhere --kill--> gone.
    Every operation on it is bounded: the socket does not block, and killing is SIGKILL.
    """

    def __init__(self, reward_name: str, *, timeout_s: float, start_timeout_s: float) -> None:
        ours, theirs = socket.socketpair()
        start = {
            "reward": reward_name,
            "timeout_s": timeout_s,
            "path": [*sys.path, os.getcwd()],
        }
        with theirs:
            # Not multiprocessing: its children import the parent's main module (torch, and
            # whatever an unguarded script does). A session of its own keeps Ctrl-C from the
            # grader and lets one signal end whatever it started.
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(start)],
                stdin=theirs.fileno(),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        self.socket = ours
        self.ready = False
        self.begun = False
        self.closed = False
        self.refusal: str | None = None
        self.tasks: deque[int] = deque()
        self.deadline = time.monotonic() + start_timeout_s
        self._timeout_s = timeout_s
        self._received = bytearray()
        self._unsent = b""

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def idle(self) -> bool:
        """Ready, alive and without a task."""
        return self.ready and not self.closed and not self.tasks

    @property
    def has_unsent(self) -> bool:
        """Whether part of the last batch waits for the socket to take it."""
        return bool(self._unsent)

    def give(self, batch: Sequence[tuple[int, bytes]]) -> None:
        """Hand over tasks, to be begun within the time limit of one."""
        self.begun = False
        self.tasks.extend(number for number, _ in batch)
        self.deadline = time.monotonic() + self._timeout_s
        self._unsent = frame(pickle.dumps(batch))
        self.send()

    def send(self) -> None:
        """Send as much as the socket takes."""
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = b""  # it is gone: receiving reports that

    def receive(self) -> Iterator[Any]:
        """Yield the messages that have arrived; sets `closed` where the grader is gone."""
        try:
            while part := self.socket.recv(1 << 16):
                self._received += part
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = bytes(self._received[LENGTH.size : end])
            del self._received[:end]
            yield json.loads(message)

    def begins(self) -> None:
        """Note that the batch has arrived; the first task's clock starts now."""
        self.begun = True
        self.deadline = time.monotonic() + self._timeout_s

    def finished(self, number: int) -> None:
        """Note a result; the next task's clock starts now."""
        expected = self.tasks.popleft()
        assert number == expected, f"grader answered task {number}, expected {expected}"
        self.deadline = time.monotonic() + self._timeout_s

    def kill(self) -> str:
        """End the process and all it started; say how it had ended."""
        with suppress(ProcessLookupError, PermissionError):  # the group may be gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self.socket.close()
        try:
            code = self._process.wait(timeout=REAP_S)
        except subprocess.TimeoutExpired:
            return f"does not end {REAP_S:g} s after SIGKILL"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with status {code}"


@final
class _Job:
    """The tasks of one `grade` call: pending, or with an outcome, or held by a worker."""

    def __init__(self, pairs: Sequence[tuple[Prompt, Completion]]) -> None:
        self.pairs = pairs
        self.pending: deque[int] = deque()
        self.outcomes: dict[int, float | str] = {}  # a reward, or what went wrong
        self._payloads: dict[int, bytes] = {}
        for number, (prompt, completion) in enumerate(pairs):
            asked = prompt.data.get("prompt", prompt.text)
            fields = (asked, completion.text, completion.tokens, dict(prompt.data))
            try:
                self._payloads[number] = pickle.dumps(fields)
                self.pending.append(number)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                self.outcomes[number] = f"the row of {prompt.prompt_id} cannot be sent: {error}"

    @property
    def done(self) -> bool:
        """Whether every task has an outcome."""
        return len(self.outcomes) == len(self.pairs)

    def next_batch(self, num_workers: int) -> list[tuple[int, bytes]]:
        """Take a share that shrinks towards the end, so that workers end together."""
        share = min(max(len(self.pending) // (2 * num_workers), 1), MAX_BATCH)
        numbers = [self.pending.popleft() for _ in range(min(share, len(self.pending)))]
        return [(number, self._payloads[number]) for number in numbers]

    def result(self) -> Graded:
        """Sort the outcomes; every task must have one."""
        rollouts, failures = [], []
        for number, (prompt, completion) in enumerate(self.pairs):
            outcome = self.outcomes[number]
            if isinstance(outcome, str):
                failure = GradingFailure(prompt=prompt, completion=completion, error=outcome)
                failures.append(failure)
            else:
                rollouts.append(Rollout(prompt=prompt, completion=completion, reward=outcome))
        return Graded(rollouts=tuple(rollouts), failures=tuple(failures))


def check_columns(reward_name: str, prompts: Sequence[Prompt]) -> None:
    """Raise `DataError` where the reward needs a key that some `Prompt.data` lacks."""
    for needed in required_columns(reward_name):
        for prompt in prompts:
            if prompt.data.get(needed) is None:
                raise DataError(
                    f"reward.name = {reward_name!r} needs {needed!r}, which prompt "
                    f"{prompt.prompt_id} lacks; it has {', '.join(prompt.data)}; name the column "
                    f"with the reference in data.answer_column, or choose another reward"
                )


@final
class GraderPool:
    """Grader processes for one reward; a context manager. Not for use by several threads.

    They start when the pool is made, in the background; `wait_ready` (or the first `grade`) waits
    for them. `close` leaves no process behind.
    """

    def __init__(
        self,
        reward_name: str,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        reward_factory(reward_name)  # refuses an unknown name before anything starts
        self._reward_name = reward_name
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._was_ready = False
        self._num_workers = workers
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._start_worker()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the graders, for reports and tests."""
        return tuple(worker.pid for worker in self._workers)

    def close(self) -> None:
        """Kill every grader. Graders keep no state, so nothing is lost; closing twice is fine."""
        while self._workers:
            self._remove(self._workers[0])
        self._selector.close()

    def wait_ready(self) -> None:
        """Wait until one grader has loaded the reward.

        Raises `ConfigError` where the reward cannot be loaded, naming why.
        """
        while not any(worker.ready for worker in self._workers):
            self._turn(_Job(()))  # ends: each worker has a deadline, and is not restarted forever

    def grade(self, pairs: Sequence[tuple[Prompt, Completion]]) -> Graded:
        """Grade each completion within the time limit; return rewards and failures in order.

        Raises `ConfigError` where the reward cannot be loaded at all, and `GradingError` where
        graders stop starting in the middle of a run.
        """
        job = _Job(pairs)
        self._turn(job, max_wait_s=0.0)  # hear who is ready, bury who died since the last call
        try:
            while not job.done:
                for worker in self._workers:
                    if worker.idle and job.pending:
                        worker.give(job.next_batch(len(self._workers)))
                self._turn(job)
        finally:  # interrupted: what busy graders will say belongs to no later call
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._remove(worker)
                self._start_worker()
        return job.result()

    def _turn(self, job: _Job, *, max_wait_s: float = float("inf")) -> None:
        """Wait for something to happen, and see to it: results, deaths, missed deadlines."""
        assert self._workers, "the pool is closed"
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.has_unsent else 0)
            if self._selector.get_key(worker.socket).events != events:
                self._selector.modify(worker.socket, events, worker)
        waiting = [worker.deadline for worker in self._workers if not worker.idle]
        wait_s = min(max(min(waiting, default=0.0) - time.monotonic(), 0.0), max_wait_s)
        for key, events in self._selector.select(wait_s):
            worker = key.data
            if events & selectors.EVENT_WRITE:
                worker.send()
            if events & selectors.EVENT_READ:
                self._listen(worker, job)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.closed:
                self._replace(worker, job, reason=worker.refusal)
            elif not worker.idle and worker.deadline <= now:
                limit_s = self._timeout_s if worker.ready else self._start_timeout_s
                self._replace(worker, job, reason=f"gave no result in {limit_s:g} s and was killed")

    def _listen(self, worker: _Worker, job: _Job) -> None:
        for message in worker.receive():
            match message:
                case {"ready": True}:
                    worker.ready = self._was_ready = True
                case {"begun": True}:
                    worker.begins()
                    self._failed_starts = 0
                case {"refused": str(why)}:
                    worker.refusal = why
                case [int(number), float(reward), None]:
                    worker.finished(number)
                    job.outcomes[number] = reward
                case [int(number), None, str(error)]:
                    worker.finished(number)
                    job.outcomes[number] = error
                case _:
                    raise AssertionError(f"grader said {message!r:.200}")

    def _replace(self, worker: _Worker, job: _Job, *, reason: str | None) -> None:
        """Bury a worker: the task it was at fails, its others are pending again."""
        tasks = worker.tasks
        ended = self._remove(worker)
        if tasks and worker.begun:
            job.outcomes[tasks.popleft()] = f"the grader {reason or f'{ended} while grading'}"
        elif tasks or not worker.ready:  # it served nobody
            at = "before it had begun to grade" if tasks else "before it had loaded the reward"
            self._count_failed_start(
                worker.refusal
                or f"reward.name = {self._reward_name!r}: the grader {reason or ended} {at}"
            )
        job.pending.extendleft(reversed(tasks))
        self._start_worker()

    def _count_failed_start(self, why: str) -> None:
        self._failed_starts += 1
        if not self._was_ready:
            raise ConfigError(why)
        if self._failed_starts >= MAX_FAILED_STARTS * self._num_workers:
            raise GradingError(f"{why} (the last of {self._failed_starts} that did not start)")

    def _start_worker(self) -> None:
        worker = _Worker(
            self._reward_name, timeout_s=self._timeout_s, start_timeout_s=self._start_timeout_s
        )
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.kill()
