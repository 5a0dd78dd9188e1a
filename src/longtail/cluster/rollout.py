"""One rollout of the group: shards for the workers, other work for idle ones.

    waiting --start--> held by a worker --end--> completions
       ^                      |
       `-- lost, or given back, as it had not begun, to an idle worker

What a worker did not return is generated again: the same noise keys give the same completions. An
idle worker learns from finished groups, trains the drafter, or rests. Nothing waits for such work:
it is ended with the last completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from longtail.cluster.records import Progress, RolloutResult, ShardResult, TaskResult
from longtail.cluster.schedule.placement import Lengths, shards
from longtail.cluster.work.drafter_publisher import DrafterPublisher
from longtail.cluster.work.idle import POLL_S, IdleCoordinator
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
    idle: IdleCoordinator
    drafter: DrafterPublisher | None
    on_progress: Callable[[Progress], None]
    learns: bool
    """Whether shards come with the sums over their completions, if such are kept."""
    requests: Sequence[Request]
    completions: dict[str, Completion] = field(default_factory=dict)
    """Finished completions by request."""
    _waiting: list[list[Request]] = field(default_factory=list)
    """Shards without a worker."""
    _held: dict[int, dict[str, Request]] = field(default_factory=dict)
    """Requests of each generating worker, those that it has finished included."""
    _num_known: dict[int, int] = field(default_factory=dict)
    """Number of completions of its shard that each worker has handed over before the end."""
    _done: list[TaskResult[ShardResult]] = field(default_factory=list)
    _sharing: set[int] = field(default_factory=set)
    """Workers that were asked to share their queues."""

    def __post_init__(self) -> None:
        self._by_name = {each.request_id: each for each in self.requests}

    def run(self) -> RolloutResult:
        """Generate all completions."""
        began = self.pool.now()
        self._waiting = shards(self.requests, self.lengths, len(self.pool.present) or 1)
        while self._waiting or self._held:
            self._start_shards()
            self.idle.assign()
            for ended in self.pool.wait(POLL_S):
                self._on_ended(ended)
            self._poll()
        done = self.pool.now()
        self.idle.end_all()
        while self.pool.workers(State.SPOT):  # each has seconds to stop
            for ended in self.pool.watch(POLL_S):
                self._on_ended(ended)
        return RolloutResult(
            completions=tuple(self.completions[each.request_id] for each in self.requests),
            shards=tuple(self._done),
            seconds=done - began,
            spots=() if self.drafter is None else tuple(self.drafter.reports),
        )

    # ---- shards

    def _start_shards(self) -> None:
        """Start waiting shards on idle workers; others that train end that for them."""
        num_waiting = len(self._waiting)
        missing = max(num_waiting - len(self.pool.workers(State.IDLE)), 0)
        for worker in self.pool.workers(State.SPOT)[:missing]:
            self.idle.end(worker)
        idle = self.pool.workers(State.IDLE)[:num_waiting]
        if self.drafter is not None:
            self.drafter.offer_missed(idle)
        for worker in idle:
            shard = self._waiting.pop(0)
            self._held[worker] = {each.request_id: each for each in shard}
            self._sharing.discard(worker)
            self._num_known[worker] = 0
            self.pool.start(worker, Worker.generate, shard, self.learns)

    def _on_ended(self, ended: TaskResult[Any]) -> None:
        """Record the end of a task; what a shard lacks is generated again.

        Of a lost worker even the finished completions are: the sums over them are gone with it.
        Generators are never stopped; Stopped is left of an earlier training of the drafter that
        `clear_stop` did not reach in time.
        """
        worker = ended.worker
        if self.idle.on_ended(ended) or worker not in self._held:
            return
        held = self._held.pop(worker)
        if not ended.is_lost and not isinstance(ended.error, Stopped):
            shard = ended.value()
            self._done.append(ended)
            self._take(shard.completions)
            held = {name: held[name] for name in held.keys() - self.completions.keys()}
        if held:
            self._waiting.append(sorted(held.values(), key=lambda each: each.request_id))

    def _take(self, found: Sequence[Completion]) -> None:
        """Record finished completions; those that are known already are the same."""
        new = [each for each in found if each.request_id not in self.completions]
        self.completions |= {each.request_id: each for each in new}
        for each in new:
            self.lengths.record(self._by_name[each.request_id], len(each.tokens))
        if new:
            self.idle.add(new)

    # ---- what changes while workers generate

    def _poll(self) -> None:
        """Report the progress of the rollout; take completions, and what queues."""
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
        self._share_queues(running)
        self.idle.poll(progress)

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

    def _share_queues(self, running: Mapping[int, Progress]) -> None:
        """Give half of the longest queue to an idle worker."""
        asked = dict.fromkeys(self._sharing & running.keys(), ())
        for worker, names in self.pool.ask_each(Worker.drain_released, asked).items():
            if names:
                self._waiting.append([self._held[worker].pop(name) for name in names])
                self._sharing.remove(worker)
        queues = {
            worker: len(self._held[worker]) - each.num_finished - each.num_running
            for worker, each in running.items()
            if worker not in self._sharing
        }
        source = max(queues, key=lambda worker: queues[worker], default=-1)
        is_possible = queues.get(source, 0) > 0 and not self._waiting
        if is_possible and self.pool.workers(State.IDLE, State.SPOT, State.AHEAD):
            self._sharing.add(source)
            self.pool.tell(source, Worker.share_queue)
