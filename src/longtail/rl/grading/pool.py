"""Grading of completions in processes that can be killed.

Owns the grader processes (`longtail.rl.grading.grader`) and the time limit of each task: of one
completion or, for rewards that compare them, of all completions of a prompt. A completion whose
grader raises, hangs, dies or sends an invalid result is a `GradingFailure`, never a reward of 0.

    pending tasks --batch--> worker 1: t0 t1 [t2] t3      t2 hangs: worker 1 is killed, t2 fails,
                  --batch--> worker 2: t4 [t5] t6         t3 is pending again, a new worker starts

Results arrive one by one, so the time limit of a task starts when the previous task has ended.

`pebble.ProcessPool` cannot replace this pool. Its parent unpickles results, which a reward may
forge; it kills a worker but not the processes that the worker started; and its time limit is that
of a chunk, not of each completion in it.
"""

import pickle
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

from longtail.errors import ConfigError, GradingError
from longtail.rl.data.requests import visit_of
from longtail.rl.grading.grader import CHECK, GRADE, GROUP
from longtail.rl.grading.output import OutputForwarder
from longtail.rl.grading.process import (
    GraderProcess,
    Outcome,
    ProtocolError,
    describe_end,
    ended_from_outside,
)
from longtail.rl.grading.reward import reward_factory
from longtail.types import Completion, GradingFailure, Prompt, Rollout

MAX_BATCH = 64
"""Most tasks in one message to a grader."""

MAX_FAILED_STARTS = 3
"""Consecutive starts, per grader, that may fail before grading is given up."""

_INVALID = "was killed: something wrote on its channel that is no answer of a grader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Result of grading a list of completions, each in exactly one field, in input order.

    Example: of 3 completions, the second of which hung its grader:
        Graded(rollouts=(first, third), failures=(GradingFailure(..., error="no result in 10 s"),))
    """

    rollouts: tuple[Rollout, ...]
    failures: tuple[GradingFailure, ...]


@final
class _Job:
    """The tasks of one call, each pending, sent to a grader, or finished."""

    def __init__(self, kind: str, payloads: Sequence[bytes | GradingError] = ()) -> None:
        self.kind = kind
        self.pending: deque[int] = deque()
        self.outcomes: dict[int, Outcome] = {}
        self._payloads = payloads
        for number, payload in enumerate(payloads):
            if isinstance(payload, bytes):
                self.pending.append(number)
            else:
                self.outcomes[number] = str(payload)

    @property
    def done(self) -> bool:
        """Whether every task has an outcome."""
        return len(self.outcomes) == len(self._payloads)

    def send_batch(self, grader: GraderProcess, num_graders: int) -> None:
        """Send a batch; batches become smaller towards the end, so that graders finish together."""
        size = min(max(len(self.pending) // (2 * num_graders), 1), MAX_BATCH)
        numbers = [self.pending.popleft() for _ in range(min(size, len(self.pending)))]
        tasks = [(number, self._payloads[number]) for number in numbers]
        grader.send_batch(numbers, pickle.dumps((self.kind, tasks)))


def _payload(task: object, *, row: str) -> bytes | GradingError:
    try:
        return pickle.dumps(task)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        return GradingError(f"the row of {row} cannot be sent: {error}")


def _grading_fields(prompt: Prompt, completion: Completion) -> tuple[Any, ...]:
    text = prompt.data.get("prompt", prompt.text)
    return (text, completion.text, completion.tokens, dict(prompt.data))


_Pairs = Sequence[tuple[Prompt, Completion]]


def _groups(pairs: _Pairs) -> list[list[tuple[Prompt, Completion]]]:
    """Divide completions, which are in the order of requests, into whole groups."""
    parts = groupby(pairs, key=lambda pair: visit_of(pair[1].request_id))
    return [list(members) for _, members in parts]


def _spread(outcome: Outcome, size: int) -> list[float | str]:
    """Return the outcome of each completion of a group from that of the group."""
    if not isinstance(outcome, list):
        return [outcome] * size
    return outcome if len(outcome) == size else [f"the grader {_INVALID}"] * size


def _graded(pairs: _Pairs, outcomes: Sequence[float | str]) -> Graded:
    """Divide completions, each with its outcome, into rollouts and failures."""
    rollouts, failures = [], []
    for (prompt, completion), outcome in zip(pairs, outcomes, strict=True):
        if isinstance(outcome, str):
            failure = GradingFailure(prompt=prompt, completion=completion, error=outcome)
            failures.append(failure)
        else:
            rollouts.append(Rollout(prompt=prompt, completion=completion, reward=outcome))
    return Graded(rollouts=tuple(rollouts), failures=tuple(failures))


@final
class GraderPool:
    """Grader processes for one reward; a context manager, for use by one thread.

    With `by_group` a task is all completions of one prompt, graded in one call; else it is one
    completion. The time limit is that of a task.

    The constructor starts the processes in the background; `wait_ready` (or the first `grade`)
    waits for them. `close` ends all of them.
    """

    def __init__(
        self,
        reward_name: str,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        by_group: bool = False,
    ) -> None:
        reward_factory(reward_name)  # raises for an unknown name before any process starts
        self._reward_name, self._by_group = reward_name, by_group
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._output = OutputForwarder()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self._was_ready = self._closed = False
        self._num_workers = workers
        self._workers: list[GraderProcess] = []
        for _ in range(workers):
            self._start_worker()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the graders' supervisors."""
        return tuple(worker.pid for worker in self._workers)

    def close(self) -> None:
        """Kill every grader; closing twice has no effect."""
        if not self._closed:
            self._closed = True
            for worker in self._workers:
                worker.hang_up()
            for worker in list(self._workers):
                self._remove(worker)
            self._selector.close()
            self._output.close()

    def wait_ready(self) -> None:
        """Wait until one grader has loaded the reward.

        Raises `ConfigError` with the reason if the reward cannot be loaded.
        """
        empty = _Job(GRADE)
        while not any(worker.ready for worker in self._workers):
            self._poll(empty)  # ends: deadlines and the number of restarts are bounded

    def grade(self, pairs: _Pairs) -> Graded:
        """Grade each task within the time limit; return rewards and failures in order.

        Raises `ConfigError` if the reward cannot be loaded, and `GradingError` if graders can no
        longer be started during a run.
        """
        self._output.reset_limit()
        parts = _groups(pairs) if self._by_group else [[pair] for pair in pairs]
        payloads = []
        for part in parts:
            fields = [_grading_fields(*pair) for pair in part]
            task = fields if self._by_group else fields[0]
            payloads.append(_payload(task, row=part[0][0].prompt_id))
        job = _Job(GROUP if self._by_group else GRADE, payloads)
        self._run(job)
        spread = [_spread(job.outcomes[number], len(part)) for number, part in enumerate(parts)]
        return _graded(pairs, [outcome for each in spread for outcome in each])

    def check(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return, by index, why some rows cannot be graded for any completion.

        A row has the columns that `required_columns` names. Raises as `grade` does.
        """
        job = _Job(CHECK, [_payload(dict(row), row=str(i)) for i, row in enumerate(rows)])
        self._run(job)
        return {i: why for i, why in sorted(job.outcomes.items()) if isinstance(why, str)}

    def _run(self, job: _Job) -> None:
        self._poll(job, max_wait_s=0.0)  # receive events since the last call
        try:
            while not job.done:
                for worker in self._workers:
                    if worker.idle and job.pending:
                        job.send_batch(worker, len(self._workers))
                self._poll(job)
        finally:  # after an interrupt, results must not reach a later call
            for worker in [worker for worker in self._workers if worker.tasks]:
                self._remove(worker)
                self._start_worker()

    def _poll(self, job: _Job, *, max_wait_s: float = float("inf")) -> None:
        """Wait for results, deaths and missed deadlines, and handle them."""
        assert not self._closed, "the pool is closed"
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
                self._receive(worker, job)
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.closed:
                self._replace(worker, job, reason=worker.refusal)
            elif not worker.idle and worker.deadline <= now:
                limit_s = self._timeout_s if worker.ready else self._start_timeout_s
                self._replace(worker, job, reason=f"gave no result in {limit_s:g} s and was killed")

    def _receive(self, worker: GraderProcess, job: _Job) -> None:
        try:
            for number, outcome in worker.receive():
                job.outcomes[number] = outcome
        except ProtocolError:
            self._replace(worker, job, reason=_INVALID)
        self._was_ready |= worker.ready
        if worker.begun:
            self._failed_starts = 0

    def _replace(self, worker: GraderProcess, job: _Job, *, reason: str | None) -> None:
        """Replace a grader: its current task fails, its other tasks are pending again."""
        tasks = worker.tasks
        code = self._remove(worker)
        if tasks and worker.begun:
            why = reason or f"{describe_end(code)} while grading"
            job.outcomes[tasks.popleft()] = f"the grader {why}"
        elif tasks or not worker.ready:
            at = "before it had begun to grade" if tasks else "before it had loaded the reward"
            self._failed_starts += 1
            if reason is None and ended_from_outside(code):
                self._check_killed_starts(f"{describe_end(code)} {at}")
            else:
                self._check_failed_starts(
                    worker.refusal
                    or f"reward.name = {self._reward_name!r}: the grader "
                    f"{reason or describe_end(code)} {at}"
                )
        job.pending.extendleft(reversed(tasks))
        self._start_worker()

    @property
    def _too_many_failed(self) -> bool:
        return self._failed_starts >= MAX_FAILED_STARTS * self._num_workers

    def _check_failed_starts(self, why: str) -> None:
        if not self._was_ready:
            raise ConfigError(why)
        if self._too_many_failed:
            raise GradingError(f"{why} (the last of {self._failed_starts} that did not start)")

    def _check_killed_starts(self, how: str) -> None:
        """Raise GradingError after too many starts that were killed from outside."""
        if self._too_many_failed:
            raise GradingError(
                f"reward.workers = {self._num_workers}: {self._failed_starts} graders in a row "
                "did not start, and the last one "
                f"{how}, most likely for lack of memory: free some, or lower reward.workers"
            )

    def _start_worker(self) -> None:
        worker = GraderProcess(
            self._reward_name,
            timeout_s=self._timeout_s,
            start_timeout_s=self._start_timeout_s,
            output=self._output.writer,
        )
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _remove(self, worker: GraderProcess) -> int | None:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.kill()
