"""Learning as idle work: gradients of finished groups, while other completions are generated.

    finished groups --> graders --> micro-batches of a group --> an idle worker's sums

A worker adds the gradient of a micro-batch to its sums (`rl.gradient_accumulators`), which no order
changes. After the rollout all workers learn from what is left, one micro-batch at a time. What a
lost worker had added is learned from again by another one: nothing is counted twice.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, final

from longtail.cluster.records import TaskResult
from longtail.cluster.work.idle import POLL_S, IdleWork
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.rl.group_stream import GroupStream
from longtail.types import Completion, MicroBatch, Request


@final
class LearningWork(IdleWork):
    """The micro-batches of a round of a step, as its groups are finished: `begin`, then `finish`.

    `learns_ahead`: a group can be learned from before the rollout ends.
    """

    is_endless = False

    def __init__(self, pool: WorkerPool, log: Callable[[str], None], *, learns_ahead: bool) -> None:
        self._pool, self._log = pool, log
        self._is_possible = learns_ahead and pool.size > 1
        self.begin(None, ())

    def begin(self, groups: GroupStream | None, requests: Sequence[Request]) -> None:
        """Begin a round; without `groups` nothing is learned from its completions."""
        self._groups, self._requests = groups, requests
        self._is_on = self._is_possible and groups is not None
        """Whether groups are learned from; not after a failure: the step's own pass shows it."""
        self._ready: list[MicroBatch] = []
        self._running: dict[int, MicroBatch] = {}
        """Micro-batch of each worker at work."""
        self._done: dict[int, list[MicroBatch]] = {}
        """Micro-batches in each worker's sums."""

    def finish(self) -> None:
        """Learn from the micro-batches that are left; the rollout is over."""
        self.poll(())
        while self._running or (self._ready and self._is_on):
            for worker in self._pool.workers(State.IDLE):
                if self._ready and self._is_on:
                    self.start(worker)
            for ended in self._pool.watch(POLL_S):
                if ended.is_lost:
                    self.on_lost(ended.worker)
                if ended.worker in self._running:
                    self.on_ended(ended)
        self._is_on = False

    def has_work(self, worker: int) -> bool:
        """Return whether a micro-batch is ready."""
        return bool(self._ready) and self._is_on

    def start(self, worker: int) -> None:
        """Start with the longest: the last micro-batches decide when all workers are done."""
        unit = max(self._ready, key=lambda each: each.packed.num_tokens)
        self._ready.remove(unit)
        self._running[worker] = unit
        self._pool.start(worker, Worker.accumulate, unit, self._requests[0].sampling)

    def add(self, completions: Sequence[Completion]) -> None:
        """Hand finished completions to the graders."""
        if self._groups is not None:
            self._groups.add(completions)

    def on_ended(self, ended: TaskResult[Any]) -> None:
        """Record that a micro-batch is in a worker's sums, or not."""
        unit = self._running.pop(ended.worker)
        if ended.error is None:
            self._done.setdefault(ended.worker, []).append(unit)
        elif ended.is_lost:
            self._ready.append(unit)
        else:
            self._is_on = False
            self._log(
                f"worker {ended.worker}: {ended.error}; nothing is learned ahead in this step"
            )

    def on_lost(self, worker: int) -> None:
        """Learn again from what was in its sums."""
        self._ready.extend(self._done.pop(worker, ()))

    def poll(self, answering: Collection[int]) -> None:
        """Take the groups that were graded."""
        if self._is_on and self._groups is not None:
            self._ready.extend(self._groups.micro_batches())
