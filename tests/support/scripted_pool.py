"""A pool of workers in simulated time: their texts, durations and faults follow a script.

    pool = ScriptedPool(2, faults=[Fault(worker=1, task="generate", after_s=3.0)])
    group = begun(pool)
    group.rollout(1, requests(40, 10, 10))     worker 1 is lost after 3 simulated seconds

Time passes in `wait`, and in `ask` when an answer is late. A wait without an end fails an
assertion.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress, TaskResult
from longtail.cluster.workers.processes import Processes
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig
from longtail.errors import ClusterError, LostWorkerError
from longtail.types import Request, SamplingParams, TrainBatch
from support.engine_requests import request_of
from support.fake_worker import WORKER_TIMEOUT_S, Death, FakeWorker, Script, Steps

TIMEOUT_S = 20.0
PROGRESS_S = 0.01
"""Seconds that `progress` waits for a worker that does not answer."""


@final
class Clock:
    def __init__(self, limit_s: float) -> None:
        self.now, self._limit_s = 0.0, limit_s

    def pass_to(self, when: float) -> None:
        self.now = max(self.now, when)
        assert self.now < self._limit_s, "a wait never ends"


def requests(*lengths: int, siblings: int = 1, first: int = 0) -> list[Request]:
    """Return a request of each length in tokens, which is its noise key modulo 1000."""
    return [
        request_of(
            f"p{first + index // siblings}@0#{index % siblings}",
            (7, first + index // siblings),
            1000 * (first + index + 1) + length,
            f"p{first + index // siblings}@0",
            max_tokens=1000,
        )
        for index, length in enumerate(lengths)
    ]


def batch(number: int) -> TrainBatch:
    """Return a batch that is identified by its number of tokens."""
    return TrainBatch(
        micro_batches=(), sampling=SamplingParams(), num_sequences=1, num_generated=number
    )


def begun(
    pool: "ScriptedPool",
    training: str = "spot",
    *,
    is_sharded: bool = False,
    min_workers: int = 0,
    **more: Any,
) -> WorkerGroup:
    """Return a group whose workers are ready and have published."""
    config = RunConfig.model_validate(
        {
            "spot": {"train": training, "buffer_mb": 1},
            "rollout": {"max_running": pool.script.max_running},
            "cluster": {
                "workers": max(pool.size, 2),
                "min_workers": min_workers,
                "worker_timeout_s": WORKER_TIMEOUT_S,
            },
            "learner": {"sharding": "full" if is_sharded else "none"},
        }
    )
    group = WorkerGroup(
        pool,
        config,
        **{"on_progress": lambda progress: None, "log": pool.log_lines.append, **more},
    )
    group.begin()
    group.publish()
    return group


@dataclass(slots=True)
class _Run:
    task: str
    steps: Steps
    wakes_s: float
    fault_s: float = math.inf
    kind: str = "lost"


@final
class ScriptedPool(Processes):
    def __init__(self, size: int, *, limit_s: float = 10_000.0, **script: Any) -> None:
        self.script, self.clock, self.size = Script(**script), Clock(limit_s), size
        self.log_lines: list[str] = []
        self.started: list[tuple[float, int, str]] = []
        """Time, worker and name of every task that was started."""
        self.answered: list[tuple[int, str]] = []
        """Worker and name of every message that was answered."""
        self.births = [0] * size
        self.workers = [FakeWorker(self, number) for number in range(size)]
        self.meetings: dict[str, list[FakeWorker]] = {}
        self.rounds: dict[tuple[str, int], list[FakeWorker]] = {}
        """Members that have reached the sum of gradients, by team and step."""
        self._counts: dict[tuple[int, str], int] = {}
        self._runs: dict[int, _Run] = {}
        self._ended: list[TaskResult[Any]] = []
        self._deaths: list[Death] = []
        for death in self.script.deaths:
            self.schedule(death)
        self._room_s: dict[int, float] = {}
        """Time at which there is room for the process of each worker that is absent."""
        for number in range(size):
            self._begin_process(number)

    def now(self) -> float:
        return self.clock.now

    def absent(self) -> frozenset[int]:
        self._pass_to(self.clock.now)
        return frozenset(self._room_s)

    def start(self, worker: int, task: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self._pass_to(self.clock.now)
        assert worker not in self._runs, "one task at a time"
        assert not [ended for ended in self._ended if ended.worker == worker]
        self._begin(worker, task.__name__, args)

    def wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        deadline = self.clock.now + timeout_s
        self._pass_to(self.clock.now)
        while not self._ended and self._next() <= deadline:
            self._pass_to(self._next())
        if not self._ended:
            self.clock.pass_to(deadline)
        ended, self._ended = self._ended, []
        return ended

    def answers(
        self, message: Callable[..., Any], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, Any]:
        found = {}
        for worker, own in args.items():
            try:
                found[worker] = self._answer(worker, TIMEOUT_S, message, *own)
            except ClusterError as error:
                found[worker] = error
        return found

    def _answer(
        self, worker: int, timeout_s: float, message: Callable[..., Any], *args: Any
    ) -> Any:
        self._pass_to(self.clock.now)
        name, one = message.__name__, self.workers[worker]
        if one.is_dead:
            raise LostWorkerError(f"worker {worker} is gone")
        late = self.script.late.get((worker, name), 0)
        if late or one.is_frozen:
            self.script.late[worker, name] = late - 1
            self.clock.pass_to(self.clock.now + timeout_s)
            raise ClusterError(f"worker {worker} has not answered")
        self.answered.append((worker, name))
        return getattr(one, name)(*args)

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        found = {}
        for worker in workers:
            with suppress(ClusterError):
                found[worker] = self._answer(worker, PROGRESS_S, Worker.progress)
        return found

    def replace(self, worker: int) -> None:
        self.kill(worker)
        self._runs.pop(worker, None)
        self._ended = [ended for ended in self._ended if ended.worker != worker]
        self.births[worker] += 1
        self.workers[worker] = FakeWorker(self, worker)
        self._begin_process(worker)

    def close(self) -> None:
        self._runs.clear()

    def rendezvous_address(self) -> str:
        if self.workers[0].is_dead:
            raise LostWorkerError("worker 0 is gone")
        return f"tcp://{len(self.meetings)}"

    # ---- the script

    def kill(self, worker: int) -> None:
        """Kill a worker's process now, and its task with it."""
        self._die(Death(worker=worker, at_s=self.clock.now))

    def schedule(self, death: Death) -> None:
        """Schedule a death."""
        self._deaths = sorted([*self._deaths, death], key=lambda each: -each.at_s)

    def starts(self, task: str) -> list[tuple[float, int]]:
        """Return the time and the worker of every start of a task."""
        return [(when, worker) for when, worker, name in self.started if name == task]

    def _begin_process(self, worker: int) -> None:
        now = self.clock.now
        ends = [
            each.until_s
            for each in self.script.absences
            if each.worker == worker and each.from_s <= now < each.until_s
        ]
        if ends:
            self._room_s[worker] = max(ends)
        else:
            self._room_s.pop(worker, None)
            self._begin(worker, "ready", ())

    def _begin(self, worker: int, task: str, args: tuple[Any, ...]) -> None:
        now, nth = self.clock.now, self._counts.get((worker, task), 0)
        self._counts[worker, task] = nth + 1
        self.started.append((now, worker, task))
        run = _Run(task, self._steps(getattr(self.workers[worker], task), args), now)
        for fault in self.script.faults:
            if (fault.worker, fault.task, fault.nth) == (worker, task, nth):
                run.fault_s, run.kind = now + fault.after_s, fault.kind
        if self.workers[worker].is_dead:
            run.fault_s, run.kind = now, "lost"
        elif self.workers[worker].is_frozen:
            run.fault_s, run.kind = now, "frozen"
        self._runs[worker] = run

    def _die(self, death: Death) -> None:
        one = self.workers[death.worker]
        one.is_dead |= death.kind == "lost"
        one.is_frozen |= death.kind == "frozen"
        if death.worker in self._runs:
            run = self._runs[death.worker]
            run.fault_s, run.kind = death.at_s, death.kind

    def _next(self) -> float:
        runs = [min(run.wakes_s, run.fault_s) for run in self._runs.values()]
        others = [*self._room_s.values(), *(death.at_s for death in self._deaths[-1:])]
        return min([*runs, *others], default=math.inf)

    def _pass_to(self, when: float) -> None:
        """Run all tasks until a time."""
        while (due := self._next()) <= when:
            self.clock.pass_to(due)
            while self._deaths and self._deaths[-1].at_s <= due:
                self._die(self._deaths.pop())
            for worker in [each for each, room_s in self._room_s.items() if room_s <= due]:
                self._begin_process(worker)
            for worker, run in list(self._runs.items()):
                if run.fault_s <= due:
                    self._fail(worker, run)
                elif run.wakes_s <= due:
                    self._resume(worker, run)
        self.clock.pass_to(when)

    def _fail(self, worker: int, run: _Run) -> None:
        if run.kind == "lost":
            del self._runs[worker]
            self.workers[worker].is_dead = True
            gone = ClusterError(f"worker {worker} is gone")
            self._ended.append(TaskResult(worker=worker, error=gone, is_lost=True))
        else:
            run.wakes_s = run.fault_s = math.inf
            self.workers[worker].is_frozen = run.kind == "frozen"

    def _resume(self, worker: int, run: _Run) -> None:
        try:
            run.wakes_s += next(run.steps)
        except StopIteration as stop:
            del self._runs[worker]
            self._ended.append(TaskResult(worker=worker, result=stop.value))
        except Exception as error:  # noqa: BLE001 - it is the result of the task
            del self._runs[worker]
            self._ended.append(TaskResult(worker=worker, error=error))

    def _steps(self, method: Callable[..., Any], args: tuple[Any, ...]) -> Steps:
        result = method(*args)
        if isinstance(result, Generator):
            return (yield from result)
        yield self.script.short_task_s
        return result
