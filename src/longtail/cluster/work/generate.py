"""Generation: the shards of a rollout, their texts, and requests that move to another worker.

    waiting --start--> held by a worker --end--> completions
       ^                      |
       `-- lost, or released -+-- released, for a worker that generates, too ---> held by that one

What a worker did not return is generated again: the same noise keys give the same texts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

from longtail.cluster.records import Progress, ShardResult
from longtail.cluster.workers.processes import TaskResult
from longtail.cluster.workers.worker import Stopped, Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.types import Completion, Request


@final
class Generation:
    """The texts of one rollout; `on_texts` takes them as they are finished.

    `learns`: shards come with the sums over their texts, if such are kept.
    """

    def __init__(
        self,
        pool: WorkerPool,
        shards: Iterable[Sequence[Request]],
        on_texts: Callable[[Sequence[Completion]], None],
        *,
        learns: bool,
    ) -> None:
        self._pool, self._on_texts, self._learns = pool, on_texts, learns
        self.waiting = [list(shard) for shard in shards]
        """Shards without a worker."""
        self.held: dict[int, dict[str, Request]] = {}
        """Requests of each generating worker, those that it has finished included."""
        self._begun: dict[str, Completion] = {}
        """Beginnings of the requests that moved."""
        self.moves: dict[str, tuple[int, int]] = {}
        """Source and target of requests that are asked for, and not yet returned."""
        self._num_known: dict[int, int] = {}
        """Number of finished texts that each worker has handed over in mid-rollout."""
        self.completions: dict[str, Completion] = {}
        self.done: list[TaskResult[ShardResult]] = []
        self.num_moved = 0

    def start(self, worker: int) -> None:
        """Start a waiting shard on an idle worker."""
        shard = self.waiting.pop(0)
        self.held[worker] = {each.request_id: each for each in shard}
        self._num_known[worker] = 0
        self._pool.start(worker, Worker.generate, shard, self._learns, self._begun_of(shard))

    def on_ended(self, ended: TaskResult[Any]) -> ShardResult | None:
        """Record the end of a worker's task; return the result of a shard.

        None if it was no shard, or if that is generated again. Of a lost worker even the finished
        texts are written again: the sums over them are gone with it. Generators are never stopped;
        Stopped is left of an earlier spot training that `clear_stop` did not reach in time.
        """
        if ended.worker not in self.held:
            return None
        self._take_released(ended.worker)
        self.moves = {n: move for n, move in self.moves.items() if move[0] != ended.worker}
        held = self.held.pop(ended.worker)
        shard: ShardResult | None = None
        if not ended.is_lost and not isinstance(ended.error, Stopped):
            shard = ended.value()
            self.done.append(ended)
            self._take(shard.completions)
            held = {name: held[name] for name in held.keys() - self.completions.keys()}
        if held:
            self.waiting.append(sorted(held.values(), key=lambda each: each.request_id))
        return shard

    def poll(self, running: Mapping[int, Progress]) -> None:
        """Take the finished texts and the released requests of workers that answer."""
        known = self._num_known
        more = {w: (known[w],) for w, each in running.items() if each.num_finished > known[w]}
        for worker, found in self._pool.ask_each(Worker.completed, more).items():
            known[worker] += len(found)
            self._take(found)
        for worker in {source for source, _ in self.moves.values()} & running.keys():
            self._take_released(worker)

    def move(self, source: int, target: int, names: Sequence[str]) -> bool:
        """Ask a worker for requests that another one goes on with; return whether it heard."""
        is_asked = self._pool.tell(source, Worker.release, names)
        if is_asked:
            self.moves |= dict.fromkeys(names, (source, target))
        return is_asked

    def total(self, running: Sequence[Progress]) -> Progress:
        """Add up the shards that are done and those that are running."""
        done = [shard.value() for shard in self.done]
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

    def _begun_of(self, shard: Sequence[Request]) -> list[Completion]:
        names = [each.request_id for each in shard]
        return [self._begun[name] for name in names if name in self._begun]

    def _take(self, completions: Sequence[Completion]) -> None:
        """Record finished texts; those that are known already are the same."""
        new = [each for each in completions if each.request_id not in self.completions]
        self.completions |= {each.request_id: each for each in new}
        if new:
            self._on_texts(new)

    def _take_released(self, worker: int) -> None:
        """Hand on what a worker has returned; what it finished meanwhile stays with it."""
        asked = {name: target for name, (source, target) in self.moves.items() if source == worker}
        if not asked:
            return
        released = self._pool.ask(worker, Worker.drain_released) or []
        moved: dict[int, list[Request]] = {}
        for each in released:
            name = each.request_id
            self._begun[name] = each
            moved.setdefault(asked[name], []).append(self.held[worker].pop(name))
        if released or asked.keys() <= self.completions.keys():  # the others are finished
            self.moves = {name: m for name, m in self.moves.items() if m[0] != worker}
        self.num_moved += len(released)
        for target, requests in moved.items():
            if target in self.held:
                self.held[target] |= {each.request_id: each for each in requests}
                self._pool.tell(target, Worker.add, requests, self._begun_of(requests))
            else:
                self.waiting.append(requests)
