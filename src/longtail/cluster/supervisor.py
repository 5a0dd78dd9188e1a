"""Keeping a pool at work: every worker's state, what is started and ended, who is lost or hangs.

    IDLE --start--> GENERATING, SPOT, LEARNING --wait--> IDLE, and how the task ended
                            |
      gone, shows no sign   |                a newcomer: ready, the policy of a colleague, publish
      of life, does not stop +--wait--> DEAD --> STARTING ---------------------------------> IDLE

A lost worker is replaced at once, beside whatever the others do. Its loss may be noticed as the end
of its task or in place of an answer, and is reported in one way only: `wait` returns it. What the
worker was doing is for the caller to hand out again.

All waiting is done in `wait`, a moment at a time, and every worker that is waited for has a
deadline: at work until its next beat, while it starts until it is ready, and an idle one that a
newcomer needs the policy of until it answers.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from longtail.cluster.pool import TaskResult, WorkerPool
from longtail.cluster.records import PolicyState, Progress
from longtail.cluster.states import State, WorkerStates
from longtail.cluster.worker import Worker
from longtail.errors import ClusterError, LostWorkerError

READY_S = 600.0
"""For a worker to begin, or a task that shows no beats: a large model is read from disk."""
STOP_S = 15.0
"""For a worker to stop: a step is far shorter."""
MOST_LOSSES = 5
"""Workers lost in a row, with nothing achieved between, that do not end the run."""
_POLL_S = 0.5
_NO_BEATS = -1
UNHEARD = object()
"""What `asked` returns for a missing answer where None is a valid one."""
_AT_WORK = (State.GENERATING, State.SPOT, State.LEARNING)
_BEATING = (Worker.generate, Worker.spot, Worker.learn)
_HAVE_POLICY = (State.IDLE, State.GENERATING, State.SPOT)
"""Whoever learns has it, too, but may be changing it."""


@final
class WorkerSupervisor:
    """Owns the states; moves a worker whenever it starts or ends something."""

    def __init__(
        self,
        pool: WorkerPool,
        hang_s: float,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_sharded: bool = False,
    ) -> None:
        self.pool, self.log, self.clock = pool, log, clock
        self._is_sharded = is_sharded
        self.states = WorkerStates(pool.size, clock)
        self._hang_s = hang_s
        self._seen = dict.fromkeys(range(pool.size), (_NO_BEATS, clock()))
        """Beats, and when there was the last sign of life, or a task was begun."""
        self._silence_s = dict.fromkeys(range(pool.size), READY_S)
        """That the present task may last without a sign of life."""
        self._told_to_stop: dict[int, float] = {}
        """Since when."""
        self._stopped: set[int] = set()
        """Told to stop, and not yet to go on."""
        self._given_up: dict[int, str] = {}
        """Why; `wait` tells."""
        self._newcomer_tasks: dict[int, Callable[..., object]] = {}
        self._without_policy: list[int] = []
        self._withholding: dict[int, float] = {}
        """Workers that were asked for the policy in vain, and since when."""
        self._losses = 0
        self._has_begun = False
        """Everybody was idle once; before, there is no policy to be handed on."""
        self.is_team_stale = True
        """Somebody has never met the others."""
        self.newcomers: set[int] = set()
        """Replaced ones, whose drafter is that of the beginning; who sees to it takes them out."""

    # ---- tasks

    def start(self, worker: int, state: State, task: Callable[..., object], *args: object) -> None:
        """Begin a task that puts an idle worker into a state."""
        self.states.move(worker, state)
        self._told_to_stop.pop(worker, None)
        if worker in self._stopped and self.asked(worker, Worker.go, UNHEARD) is not UNHEARD:
            self._stopped.discard(worker)
        self._send(worker, task, *args)

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Return what has ended, its worker idle; the lost ones are being replaced."""
        self._hand_on_the_policy()
        found = []
        for ended in self._told() or self.pool.wait(timeout_s):
            state = self.states.state(ended.worker)
            if ended.is_lost:
                self._replace(ended.worker, str(ended.error))
            elif state is State.STARTING:
                self._go_on_starting(ended)
            else:
                self.states.move(ended.worker, State.IDLE)
                # Spot training ends whenever it is told to; what failed is no achievement either.
                if ended.error is None and state is not State.SPOT:
                    self._losses = 0
            if state is not State.STARTING:
                found.append(ended)
        self._give_up_late_starters()
        return found

    def run(
        self, state: State, task: Callable[..., object], args: Mapping[int, tuple[Any, ...]]
    ) -> dict[int, TaskResult]:
        """Have idle workers do a task, each with its arguments; return how it ended for each.

        How long it takes nobody knows until the first one is done.
        """
        self.wait_ready()
        for worker, own in args.items():
            self.start(worker, state, task, *own)
        found: dict[int, TaskResult] = {}
        first_s = math.inf
        while waiting := args.keys() - found.keys():
            ends = self.wait(_POLL_S)
            found.update((ended.worker, ended) for ended in ends)
            if not all(ended.is_lost for ended in ends):
                first_s = min(first_s, self.clock())
            if not ends:
                self.look()
            if self.clock() - first_s > self._hang_s:
                for late in waiting - found.keys():
                    self.give_up(late, f"worker {late} is {self._hang_s:.0f} s later than others")
        return found

    def wait_ready(self) -> None:
        """Wait until nobody is starting any more."""
        while self._given_up or self.states.workers(State.STARTING):
            self.wait(_POLL_S)
        self._has_begun = True

    def abandon(self) -> None:
        """Have everybody stop generating and training; what came of it is dropped."""
        while busy := self.states.workers(State.GENERATING, State.SPOT):
            for worker in busy:
                self.stop(worker)
            if not self.wait(_POLL_S):
                self.look()

    def _send(self, worker: int, task: Callable[..., object], *args: object) -> None:
        self._seen[worker] = (_NO_BEATS, self.clock())
        self._silence_s[worker] = self._hang_s if task in _BEATING else READY_S
        try:
            self.pool.start(worker, task, *args)
        except ClusterError as error:
            self.give_up(worker, str(error))

    # ---- messages

    def asked(self, worker: int, message: Callable[..., Any], otherwise: Any, *args: object) -> Any:
        """Ask a worker that may be gone or late: its answer, or `otherwise`.

        A worker that is gone is given up, whatever it was doing: an idle one has no task to end.
        """
        try:
            return self.pool.ask(worker, message, *args)
        except LostWorkerError as error:
            self.give_up(worker, str(error))
            return otherwise
        except ClusterError:
            return otherwise

    def stop(self, worker: int) -> None:
        """Have a worker end its task; who has not after some seconds is given up by `look`."""
        if worker not in self._told_to_stop:
            self._told_to_stop[worker] = self.clock()
            self._stopped.add(worker)
            self.asked(worker, Worker.stop, None)

    def look(self) -> dict[int, Progress]:
        """Return how far everybody at work is; give up who hangs, or does not stop.

        A sign of life is a beat, or word from who waits for others.
        """
        at_work = self.states.workers(*_AT_WORK)
        found = self.pool.progress(at_work)
        now = self.clock()
        for worker in at_work:
            beats, since = self._seen[worker]
            told = found.get(worker)
            silence_s = self._silence_s[worker]
            if now - self._told_to_stop.get(worker, math.inf) > STOP_S:
                self.give_up(worker, f"worker {worker} did not stop within {STOP_S:.0f} s")
            elif told is not None and (told.beats != beats or told.is_waiting):
                self._seen[worker] = (told.beats, now)
            elif now - since > silence_s:
                self.give_up(worker, f"worker {worker} made no step for {silence_s:.0f} s")
        return found

    # ---- losses

    def give_up(self, worker: int, reason: str) -> None:
        """Count a worker as lost from now on, whatever it does."""
        self._given_up.setdefault(worker, reason)

    def _told(self) -> list[TaskResult]:
        given_up, self._given_up = self._given_up, {}
        return [
            TaskResult(worker=worker, error=ClusterError(reason), is_lost=True)
            for worker, reason in given_up.items()
        ]

    def _replace(self, worker: int, reason: str) -> None:
        """Strike a worker off and begin another in its place."""
        self._losses += 1
        self.log(f"{reason}; it is replaced, and what it was doing is done again")
        self.states.move(worker, State.DEAD, reason)
        if self._losses > MOST_LOSSES:
            raise ClusterError(
                f"{self._losses} workers were lost in a row, the last with: {reason}; mend that, "
                "then start again: the run resumes from its newest checkpoint"
            )
        is_shard = self._is_sharded and self._has_begun
        if self.pool.size == 1 or is_shard:
            what = "a shard of the policy (learner.sharding)" if is_shard else "the only worker"
            raise ClusterError(
                f"{what} is lost ({reason}); start again: the run resumes from its newest "
                "checkpoint"
            )
        self.pool.replace(worker)
        self.states.move(worker, State.STARTING)
        self._seen[worker] = (_NO_BEATS, self.clock())
        self._told_to_stop.pop(worker, None)
        self._stopped.discard(worker)
        self.newcomers.add(worker)
        self.is_team_stale = True
        self._withholding.pop(worker, None)
        if worker in self._without_policy:
            self._without_policy.remove(worker)
        if self._has_begun:
            self._newcomer_tasks[worker] = Worker.ready

    def _go_on_starting(self, ended: TaskResult) -> None:
        """After `ready` a newcomer waits for a policy; once that is published, it is idle."""
        worker = ended.worker
        ended.value()
        task = self._newcomer_tasks.pop(worker, None)
        if task is Worker.ready:
            self._without_policy.append(worker)
        elif task is Worker.restore:
            self._begin_newcomer(worker, Worker.publish)
        else:
            self.states.move(worker, State.IDLE)

    def _begin_newcomer(self, worker: int, task: Callable[..., object], *args: object) -> None:
        self._newcomer_tasks[worker] = task
        self._send(worker, task, *args)

    def _hand_on_the_policy(self) -> None:
        """Let newcomers have the policy of a colleague; while all of them learn, they wait."""
        if not self._without_policy:
            self._withholding.clear()
        while self._without_policy and (policy := self._policy()) is not None:
            self._begin_newcomer(self._without_policy.pop(0), Worker.restore, policy)

    def _policy(self) -> PolicyState | None:
        """Copy the policy of a worker that has it; None if none can give it now.

        A worker that does not hand it on for `hang_s` is given up. Raises ClusterError if no worker
        has it any more.
        """
        being_given = any(task is not Worker.ready for task in self._newcomer_tasks.values())
        if not being_given and not self.states.workers(*_HAVE_POLICY, State.LEARNING):
            raise ClusterError(
                "all workers are lost, and the policy with them; start again: the run resumes from "
                "its newest checkpoint"
            )
        for worker in self.states.workers(*_HAVE_POLICY):
            since = self._withholding.setdefault(worker, self.clock())
            state: PolicyState | None = self.asked(worker, Worker.policy_state, None)
            if state is not None:
                del self._withholding[worker]
                return state
            if self.clock() - since > self._hang_s:
                self.give_up(
                    worker, f"worker {worker} has not handed on the policy for {self._hang_s:.0f} s"
                )
        return None

    def _give_up_late_starters(self) -> None:
        for worker in self.states.workers(State.STARTING):
            waits = worker in self._without_policy
            if not waits and self.clock() - self._seen[worker][1] > READY_S:
                self.give_up(worker, f"worker {worker} did not begin within {READY_S:.0f} s")
