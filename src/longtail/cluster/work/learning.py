"""Learning as idle work: gradients of finished groups, while other texts are being written.

    finished texts --> graders --> micro-batches of a group --> an idle worker's sums

A worker adds the gradient of a micro-batch to its sums (`rl.gradient_sums`), which no order
changes. When the last text is written all workers learn from what is left, one micro-batch at a
time. What a lost worker had added is learned from again by another one: nothing is counted twice.
"""

from collections.abc import Callable, Collection
from typing import Any, final

from longtail.cluster.records import Forecast
from longtail.cluster.work.idle import IdleWork
from longtail.cluster.workers.processes import TaskResult
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.rl.streaming import GroupStream
from longtail.types import MicroBatch, SamplingParams

_FADE = 0.8
"""Weight of the seconds known before beside those of the newest micro-batch."""


@final
class LearningWork(IdleWork):
    """The micro-batches of one round of a step, as its groups are finished.

    `token_s`: seconds of learning from a token in earlier rounds; 0 if unknown.
    """

    is_endless = False

    def __init__(
        self,
        pool: WorkerPool,
        groups: GroupStream,
        token_s: float,
        sampling: SamplingParams,
        log: Callable[[str], None],
    ) -> None:
        self._pool, self._groups, self.token_s = pool, groups, token_s
        self._sampling, self._log = sampling, log
        self._ready: list[MicroBatch] = []
        self._running: dict[int, tuple[MicroBatch, float]] = {}
        """Micro-batch of each worker at work, and when it began."""
        self._done: dict[int, list[MicroBatch]] = {}
        """Micro-batches in each worker's sums."""
        self._is_off = False
        """Whether a micro-batch failed: the step's own pass finds out why."""

    @property
    def is_unfinished(self) -> bool:
        """Whether a micro-batch waits for a worker, or is being learned from."""
        return bool(self._running or (self._ready and not self._is_off))

    def seconds_of(self, num_more: int) -> float:
        """Return the seconds of learning from what is ready and `num_more` tokens."""
        return self.token_s * (num_more + sum(u.packed.num_tokens for u in self._ready))

    def rate(self, worker: int, forecast: Forecast) -> float:
        """Return the share of a worker in the learning after the rollout, which is saved."""
        is_possible = self._ready and not self._is_off
        return 1 / forecast.num_workers - forecast.slowdown if is_possible else 0.0

    def start(self, worker: int, forecast: Forecast) -> None:
        """Learn from the longest micro-batch: the last ones decide when all workers are done."""
        unit = max(self._ready, key=lambda each: each.packed.num_tokens)
        self._ready.remove(unit)
        self._running[worker] = unit, self._pool.now()
        self._pool.start(worker, Worker.accumulate, unit, self._sampling)

    def on_ended(self, ended: TaskResult[Any]) -> None:
        """Record that a micro-batch is in a worker's sums, or not."""
        unit, began_s = self._running.pop(ended.worker)
        if ended.error is None:
            self._done.setdefault(ended.worker, []).append(unit)
            each_s = (self._pool.now() - began_s) / max(unit.packed.num_tokens, 1)
            self.token_s = _FADE * self.token_s + (1 - _FADE) * each_s if self.token_s else each_s
        elif ended.is_lost:
            self._ready.append(unit)
        else:
            self._is_off = True
            self._log(
                f"worker {ended.worker}: {ended.error}; nothing is learned ahead in this step"
            )

    def on_lost(self, worker: int) -> None:
        """Learn again from what was in its sums."""
        self._ready.extend(self._done.pop(worker, ()))

    def poll(self, answering: Collection[int]) -> None:
        """Take the groups that were graded."""
        self._ready.extend(self._groups.micro_batches())
