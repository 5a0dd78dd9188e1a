"""The pool of workers: their states, start and end of their tasks, and what if one dies.

    IDLE --start--> GENERATING, SPOT, AHEAD, LEARNING --wait--> IDLE, and the task's result
                            |
      gone, makes no step,  |             a new process: ready, a copy of the policy, publish
      does not stop         +--wait--> DEAD --> STARTING ---------------------------> IDLE

A lost worker is replaced at once, while the others go on. A loss may be noticed as the end
of a task or in place of an answer; `wait` returns it in either case, and the caller starts the task
again. A worker for whose process no host has room is ABSENT. As long as `min_workers` are ready,
the others go on without those that are absent or start, which take part once they are ready.

All waiting is done in `wait`, a short time at a time, and every worker that is waited for has a
deadline: a busy worker until its next step, a starting one until it is ready, and an idle one
that was asked for the policy until it answers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from longtail.cluster.records import PolicyState, Progress, TaskResult
from longtail.cluster.workers.processes import Processes
from longtail.cluster.workers.states import State, WorkerStates
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig
from longtail.drafter.weights import DrafterWeights
from longtail.errors import AGAIN, ClusterError, LostWorkerError

R = TypeVar("R")
Task = Callable[..., R]
"""A method of `Worker` that runs alone, with a result R."""

READY_S = 600.0
"""Seconds for a worker to start, or for a task without beats: a large model is read from disk."""
LAST_CALL_S = 30.0
"""Seconds for workers to find room before a run begins without them, as torchrun's last call."""
STOP_S = 15.0
"""Seconds for a worker to stop its task: a step is far shorter."""
MAX_LOSSES = 5
"""Number of workers lost in a row, with no task done in between, that do not end the run."""
_POLL_S = 0.5
_NO_BEATS = -1
_WITH_BEATS = {
    Worker.generate: State.GENERATING,
    Worker.train_drafter: State.SPOT,
    Worker.accumulate: State.AHEAD,
    Worker.learn: State.LEARNING,
}
"""Tasks in which `Progress.beats` rise, and the worker's state; in all others it is LEARNING."""
_UNREADY = (State.STARTING, State.ABSENT)
_BUSY = (State.GENERATING, State.SPOT, State.AHEAD, State.LEARNING)
_HAVE_POLICY = (State.IDLE, State.GENERATING, State.SPOT, State.AHEAD)
"""States in which the policy can be copied; in LEARNING it may be changing."""


@dataclass(slots=True)
class _Watched:
    """Signs of life, stop requests and startup of a worker's process."""

    seen_s: float
    """Time of its last sign of life, or of the start of its task."""
    beats: int = _NO_BEATS
    max_silence_s: float = READY_S
    """Seconds that its task may take without a sign of life."""
    stop_s: float = math.inf
    """Time at which it was asked to stop its task."""
    must_clear_stop: bool = False
    """Whether it would still obey that request in its next task."""
    needs_policy: bool = False
    gets_policy: bool = False
    withholds_since_s: float | None = None
    """Time of the first request for the policy that it has not answered."""


@final
class WorkerPool:
    """All workers, numbered from 0. `on_replaced` is called with each that is replaced."""

    def __init__(
        self,
        processes: Processes,
        config: RunConfig,
        log: Callable[[str], None],
        on_replaced: Callable[[int], None],
    ) -> None:
        self.processes, self._log, self._on_replaced = processes, log, on_replaced
        self.size = processes.size
        self._timeout_s, self._is_sharded = config.cluster.worker_timeout_s, config.is_sharded
        self._min_workers = config.cluster.min_workers or self.size
        self.states = WorkerStates(self.size, self.now)
        self._watched = {worker: _Watched(self.now()) for worker in range(self.size)}
        self._lost: dict[int, str] = {}
        """Reason for each loss that `wait` has not returned yet."""
        self.drafter: DrafterWeights | None = None
        """Drafter that new processes adopt; None: that of the run's beginning."""
        self._without_policy: list[int] = []
        """New processes that are ready for a copy of the policy."""
        self._losses = 0
        self._has_begun = False
        """Whether all workers were idle once; before, there is no policy to copy."""
        self._complete_s = self._began_s = self.now()
        """Time at which there was last room for enough workers, and of the beginning."""

    def now(self) -> float:
        """Return the time in seconds."""
        return self.processes.now()

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in ascending order."""
        return self.states.workers(*states)

    @property
    def present(self) -> list[int]:
        """Workers that are ready, in ascending order."""
        return [each for each in self._watched if self.states.state(each) not in _UNREADY]

    # ---- tasks

    def start(self, worker: int, task: Task[Any], *args: object) -> None:
        """Start a task on an idle worker."""
        self.states.move(worker, _WITH_BEATS.get(task, State.LEARNING))
        process = self._watched[worker]
        process.stop_s = math.inf
        if process.must_clear_stop and self.tell(worker, Worker.clear_stop):
            process.must_clear_stop = False
        self._send(worker, task, *args)

    def wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        """Return the tasks that have ended: their workers are idle, or lost and being replaced."""
        self._follow_room()
        self._copy_policy()
        found = []
        lost: list[TaskResult[Any]] = [
            TaskResult(worker=worker, error=ClusterError(reason), is_lost=True)
            for worker, reason in self._lost.items()
        ]
        self._lost.clear()
        for ended in lost or self.processes.wait(timeout_s):
            state = self.states.state(ended.worker)
            if ended.is_lost:
                self._replace(ended.worker, str(ended.error))
            elif state in _UNREADY:
                self._continue_startup(ended)
            else:
                self.states.move(ended.worker, State.IDLE)
                # Spot training ends whenever it is stopped, which achieves nothing.
                if ended.error is None and state is not State.SPOT:
                    self._losses = 0
            if state not in _UNREADY:
                found.append(ended)
        for worker in set(self.workers(State.STARTING)) - set(self._without_policy):
            if self.now() - self._watched[worker].seen_s > READY_S:
                self.mark_lost(worker, f"worker {worker} did not begin within {READY_S:.0f} s")
        return found

    def watch(self, timeout_s: float) -> list[TaskResult[Any]]:
        """Return the tasks that have ended; if there are none, look for workers that hang."""
        if not (ends := self.wait(timeout_s)):
            self.check_progress()
        return ends

    def run(
        self, task: Task[R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, TaskResult[R]]:
        """Run a task on idle workers, each with its own arguments, and return all results.

        Workers that are not present have none. The duration of the task is not known in advance:
        once the first worker is done, the others have `worker_timeout_s` left.
        """
        self.wait_ready()
        started = [worker for worker in self.present if worker in args]
        for worker in started:
            self.start(worker, task, *args[worker])
        found: dict[int, TaskResult[R]] = {}
        first_s = math.inf
        while waiting := set(started) - found.keys():
            ends = self.watch(_POLL_S)
            found.update((ended.worker, ended) for ended in ends)
            if not all(ended.is_lost for ended in ends):
                first_s = min(first_s, self.now())
            if self.now() - first_s > self._timeout_s:
                for late in waiting - found.keys():
                    self.mark_lost(
                        late, f"worker {late} is {self._timeout_s:.0f} s later than others"
                    )
        return found

    def run_on(self, workers: Sequence[int], task: Task[R], *args: object) -> list[R]:
        """Run a task on some workers with the same arguments, as `run_each`."""
        return self.run_each(task, dict.fromkeys(workers, args))

    def run_each(self, task: Task[R], args: Mapping[int, tuple[object, ...]]) -> list[R]:
        """Run a task on workers, each with its own arguments, again on those that are lost.

        Return the results in the order of `args`, without workers that are not present any more.
        Raises what the task raises.
        """
        found: dict[int, R] = {}
        while missing := {each: own for each, own in args.items() if each not in found}:
            ends = self.run(task, missing)
            if not ends:
                break
            found |= {worker: end.value() for worker, end in ends.items() if not end.is_lost}
        return [found[worker] for worker in args if worker in found]

    def run_on_all(self, task: Task[R], *args: object) -> list[R]:
        """Run a task on all workers that are present, and return the results by worker."""
        self.wait_ready()
        return self.run_on(self.present, task, *args)

    def wait_ready(self) -> None:
        """Wait until enough workers are ready, and none is being given the policy."""
        while self._lost or not self._is_complete():
            self.wait(_POLL_S)
        self._has_begun = True

    def _is_complete(self) -> bool:
        """Return whether enough workers are ready; at the beginning, all that have found room."""
        unready, absent = self.workers(*_UNREADY), self.workers(State.ABSENT)
        if self._has_begun:
            waits = any(self._watched[each].gets_policy for each in unready)
        else:
            is_early = self.now() - self._began_s < LAST_CALL_S
            waits = unready != absent or (bool(absent) and is_early)
        return not waits and not self._are_too_many(unready)

    def _are_too_many(self, lacking: Sequence[int]) -> bool:
        """Return whether a run cannot go on without these workers; worker 0 writes its files."""
        return 0 in lacking or self.size - len(lacking) < self._min_workers

    def abandon(self) -> None:
        """Stop generation and idle work on all workers, and drop their results."""
        while self.workers(State.GENERATING, State.SPOT, State.AHEAD):
            for worker in self.workers(State.GENERATING, State.SPOT):
                self.stop(worker)
            self.watch(_POLL_S)

    def _send(self, worker: int, task: Task[Any], *args: object) -> None:
        process = self._watched[worker]
        process.beats, process.seen_s = _NO_BEATS, self.now()
        process.max_silence_s = self._timeout_s if task in _WITH_BEATS else READY_S
        try:
            self.processes.start(worker, task, *args)
        except ClusterError as error:
            self.mark_lost(worker, str(error))

    # ---- messages

    def ask(self, worker: int, message: Callable[..., R], *args: object) -> R | None:
        """Return a worker's answer to a message; None if it is gone or does not answer in time.

        A worker that is gone is marked as lost: an idle one has no task that could end.
        """
        return self.ask_each(message, {worker: args}).get(worker)

    def tell(self, worker: int, message: Callable[..., None], *args: object) -> bool:
        """Send a message that has no answer; return whether the worker confirmed it in time."""
        return worker in self.ask_each(message, {worker: args})

    def ask_each(
        self, message: Callable[..., R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, R]:
        """Return the answers of several workers, asked at once; those as in `ask` are left out."""
        found: dict[int, R] = {}
        for worker, answer in self.processes.answers(message, args).items():
            if isinstance(answer, LostWorkerError):
                self.mark_lost(worker, str(answer))
            elif not isinstance(answer, ClusterError):
                found[worker] = answer
        return found

    def stop(self, worker: int) -> None:
        """Ask a worker to end its task; `check_progress` marks it as lost if it does not."""
        process = self._watched[worker]
        if process.stop_s == math.inf:
            process.stop_s, process.must_clear_stop = self.now(), True
            self.tell(worker, Worker.stop)

    def check_progress(self) -> dict[int, Progress]:
        """Return the progress of all busy workers; mark those as lost that hang or do not stop.

        A rise of `Progress.beats` is a sign of life, and so is `Progress.is_waiting`.
        """
        busy = self.workers(*_BUSY)
        found = self.processes.progress(busy)
        now = self.now()
        for worker in busy:
            process, progress = self._watched[worker], found.get(worker)
            if now - process.stop_s > STOP_S:
                self.mark_lost(worker, f"worker {worker} did not stop within {STOP_S:.0f} s")
            elif progress is not None and (progress.beats != process.beats or progress.is_waiting):
                process.beats, process.seen_s = progress.beats, now
            elif now - process.seen_s > process.max_silence_s:
                silence = f"{process.max_silence_s:.0f} s"
                self.mark_lost(worker, f"worker {worker} made no step for {silence}")
        return found

    # ---- losses

    def mark_lost(self, worker: int, reason: str) -> None:
        """Count a worker as lost from now on; `wait` replaces it."""
        self._lost.setdefault(worker, reason)

    def _replace(self, worker: int, reason: str) -> None:
        self._losses += 1
        self._log(f"{reason}; it is replaced, and what it was doing is done again")
        self.states.move(worker, State.DEAD)
        if self._losses > MAX_LOSSES:
            raise ClusterError(
                f"{self._losses} workers were lost in a row, the last with: {reason}; "
                f"find its cause, then {AGAIN}"
            )
        is_shard = self._is_sharded and self._has_begun
        if self.size == 1 or is_shard:
            what = "a shard of the policy (learner.sharding)" if is_shard else "the only worker"
            raise ClusterError(f"{what} is lost ({reason}); {AGAIN}")
        self.processes.replace(worker)
        self._complete_s = self.now()
        self._begin_start(worker)
        self._without_policy = [each for each in self._without_policy if each != worker]
        self._on_replaced(worker)
        self._follow_room()

    def _begin_start(self, worker: int) -> None:
        self.states.move(worker, State.STARTING)
        self._watched[worker] = _Watched(self.now(), needs_policy=self._has_begun)

    def _follow_room(self) -> None:
        """Note which new processes have no room on a host, and which have found some.

        Raises ClusterError if there has not been room for enough for `worker_timeout_s`.
        """
        absent = self.processes.absent()
        for worker in self.workers(State.ABSENT):
            if worker not in absent:
                self._begin_start(worker)
                if self._has_begun:
                    self._log(f"there is room for worker {worker}: it starts, and takes part")
        for worker in self.workers(State.STARTING):
            if worker in absent:
                self.states.move(worker, State.ABSENT)
        if not self._are_too_many(self.workers(State.ABSENT)):
            self._complete_s = self.now()
        elif self.now() - self._complete_s > self._timeout_s:
            names = ", ".join(map(str, self.workers(State.ABSENT)))
            raise ClusterError(
                f"cluster.workers = {self.size}: for {self._timeout_s:.0f} s there has been "
                f"no room for worker {names}: each needs a processor of Ray and its GPUs, worker 0 "
                "on the driver's host (see `ray status`); start more hosts, or lower "
                f"cluster.workers or cluster.min_workers, then {AGAIN}"
            )

    def _continue_startup(self, ended: TaskResult[Any]) -> None:
        """Start the next task of a new process, or make it idle after the last one."""
        ended.value()
        process = self._watched[ended.worker]
        process.gets_policy = False
        if process.needs_policy:
            self._without_policy.append(ended.worker)
        else:
            self.states.move(ended.worker, State.IDLE)

    def _copy_policy(self) -> None:
        """Copy the policy to new processes; while others learn, they wait."""
        if not self._without_policy:
            for process in self._watched.values():
                process.withholds_since_s = None
        if self.workers(State.LEARNING):  # the policy may be changing
            return
        while self._without_policy and (policy := self._policy()) is not None:
            worker = self._without_policy.pop(0)
            process = self._watched[worker]
            process.needs_policy, process.gets_policy = False, True
            self._send(worker, Worker.continue_run, policy, self.drafter)

    def _policy(self) -> PolicyState | None:
        """Return the policy of a worker that has it; None if none answers now.

        A worker that does not answer for `worker_timeout_s` is marked as lost. Raises ClusterError
        if no worker has the policy any more.
        """
        is_being_copied = any(process.gets_policy for process in self._watched.values())
        if not is_being_copied and not self.workers(*_HAVE_POLICY, State.LEARNING):
            raise ClusterError(f"all workers are lost, and the policy with them; {AGAIN}")
        for worker in self.workers(*_HAVE_POLICY):
            process = self._watched[worker]
            if process.withholds_since_s is None:
                process.withholds_since_s = self.now()
            policy = self.ask(worker, Worker.policy_state)
            if policy is not None:
                process.withholds_since_s = None
                return policy
            if self.now() - process.withholds_since_s > self._timeout_s:
                silence = f"{self._timeout_s:.0f} s"
                self.mark_lost(
                    worker, f"worker {worker} has not handed on the policy for {silence}"
                )
        return None
