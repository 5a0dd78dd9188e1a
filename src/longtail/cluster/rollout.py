"""Runs one rollout: shards for workers, lost ones again, other work for idle workers.

    waiting --start--> held by a worker --end--> completions
       ^                      |
       `------- lost ---------'

What a worker did not return is generated again: the same noise keys give the same completions. An
idle worker does the first kind of other work that there is, or rests. Nothing waits for such work:
it is ended with the last completion.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from longtail.cluster.records import Progress, RolloutResult, ShardResult, TaskResult
from longtail.cluster.schedule.placement import Lengths, shards
from longtail.cluster.work.idle import POLL_S, IdleWork
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Stopped, Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.types import Completion, Request


@final
@dataclass(kw_only=True)
class Rollout:
    """A rollout, from its requests to its result: call `run` once."""

    pool: WorkerPool
    lengths: Lengths
    works: Sequence[IdleWork]
    """Work for idle workers, the first kinds before the others."""
    on_progress: Callable[[Progress], None]
    learns: bool
    """Whether shards come with the sums over their completions, if such are kept."""
    requests: Sequence[Request]
    completions: dict[str, Completion] = field(default_factory=dict)
    """Finished completions by request."""
    _waiting: list[list[Request]] = field(default_factory=list)
    """Shards without a worker."""
    _held: dict[int, list[Request]] = field(default_factory=dict)
    """Shard of each generating worker."""
    _num_known: dict[int, int] = field(default_factory=dict)
    """Number of completions of its shard that each worker has handed over before the end."""
    _done: list[TaskResult[ShardResult]] = field(default_factory=list)
    _at: dict[int, IdleWork] = field(default_factory=dict)
    """Work of each worker that has one."""

    def __post_init__(self) -> None:
        self._by_name = {each.request_id: each for each in self.requests}

    def run(self) -> RolloutResult:
        """Generate all completions."""
        began = self.pool.now()
        self._waiting = shards(self.requests, self.lengths, len(self.pool.present) or 1)
        while self._waiting or self._held:
            self._start_shards()
            self._assign()
            for ended in self.pool.wait(POLL_S):
                self._on_ended(ended)
            self._poll()
        done = self.pool.now()
        for worker in [each for each, work in self._at.items() if work.is_endless]:
            self._at[worker].end(worker)
        while self.pool.workers(State.SPOT):  # each has seconds to stop
            for ended in self.pool.watch(POLL_S):
                self._on_ended(ended)
        return RolloutResult(
            completions=tuple(self.completions[each.request_id] for each in self.requests),
            shards=tuple(self._done),
            seconds=done - began,
        )

    # ---- shards

    def _start_shards(self) -> None:
        """Start waiting shards on idle workers; others that train end that for them."""
        num_waiting = len(self._waiting)
        missing = max(num_waiting - len(self.pool.workers(State.IDLE)), 0)
        for worker in self.pool.workers(State.SPOT)[:missing]:
            self._at[worker].end(worker)
        for worker in self.pool.workers(State.IDLE)[:num_waiting]:
            self._held[worker] = shard = self._waiting.pop(0)
            self._num_known[worker] = 0
            self.pool.start(worker, Worker.generate, shard, self.learns)

    def _on_ended(self, ended: TaskResult[Any]) -> None:
        """Record the end of a task; the shard of a lost worker is generated again.

        Its finished completions are, too: the sums over them are gone with it. Generators are never
        stopped; Stopped is left of an earlier training of the drafter that `clear_stop` did not
        reach in time.
        """
        worker = ended.worker
        work = self._at.pop(worker, None)
        if ended.is_lost:
            for each in self.works:
                each.on_lost(worker)
        if work is not None:
            work.on_ended(ended)
        if worker not in self._held:
            return
        shard = self._held.pop(worker)
        if ended.is_lost or isinstance(ended.error, Stopped):
            self._waiting.append(shard)
            return
        self._take(ended.value().completions)
        self._done.append(ended)

    def _take(self, found: Sequence[Completion]) -> None:
        """Record finished completions; those that are known already are the same."""
        new = [each for each in found if each.request_id not in self.completions]
        self.completions |= {each.request_id: each for each in new}
        for each in new:
            self.lengths.record(self._by_name[each.request_id], len(each.tokens))
        for work in self.works if new else ():
            work.add(new)

    # ---- what changes while workers generate

    def _assign(self) -> None:
        """Start other work on each idle worker for which there is some."""
        for worker in self.pool.workers(State.IDLE):
            if (work := self._first(worker)) is not None:
                self._at[worker] = work
                work.start(worker)

    def _first(self, worker: int) -> IdleWork | None:
        return next((work for work in self.works if work.has_work(worker)), None)

    def _poll(self) -> None:
        """Report progress, take completions, and exchange what is new with idle workers.

        Endless work is ended for work of an earlier kind, or rest.
        """
        progress = self.pool.check_progress()
        if not self._held:
            return
        running = {worker: each for worker, each in progress.items() if worker in self._held}
        self.on_progress(self._total(list(running.values())))
        known = self._num_known
        more = {w: (known[w],) for w, each in running.items() if each.num_finished > known[w]}
        for worker, found in self.pool.ask_each(Worker.completed, more).items():
            known[worker] += len(found)
            self._take(found)
        for work in self.works:
            work.poll(tuple(progress))
        for worker, work in list(self._at.items()):
            if work.is_endless and self._first(worker) is not work:
                work.end(worker)

    def _total(self, running: Sequence[Progress]) -> Progress:
        """Add up the shards that are done and those that are running."""
        done = [shard.value() for shard in self._done]
        drafts = [part.drafts for part in running if part.drafts is not None]
        return Progress(
            num_finished=sum(len(shard.completions) for shard in done)
            + sum(part.num_finished for part in running),
            num_generated=sum(shard.report.num_generated for shard in done)
            + sum(part.num_generated for part in running),
            num_running=sum(part.num_running for part in running),
            drafts=any(drafts) if drafts else None,
            text=next((part.text for part in running if part.text), ""),
        )
