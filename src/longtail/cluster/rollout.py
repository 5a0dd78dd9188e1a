"""One rollout by all workers: each generates a shard of the requests, and idle ones train.

    shards ---> GENERATING ---> IDLE ---> SPOT  until the last generator is done
                   |  texts       ^         |
                   +--------------|---------+  drafters ---> offers to those that still generate

Nothing waits for spot training (`spot`): it is stopped when the last generator is done, and a
worker that does not stop within seconds is replaced. The shard of a lost worker is generated again
as a whole: the same noise keys give the same texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

from longtail.cluster import tasks
from longtail.cluster.drafter.publisher import Publisher
from longtail.cluster.idle import Forecast
from longtail.cluster.placement import PromptGroup, part_sizes, place
from longtail.cluster.pool import TaskResult
from longtail.cluster.records import Progress, ShardResult
from longtail.cluster.spot import DrafterWork
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.worker import Stopped, Worker
from longtail.drafter.training.replica import SpotReport
from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import LoggedRollout, RolloutSeries
from longtail.types import Completion, Request

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """The completions of a rollout, with the measurements of its workers."""

    completions: tuple[Completion, ...]
    """Completions in the order of the requests."""
    shards: tuple[TaskResult[ShardResult], ...]
    """Shards in the order in which they were done; a worker that took over another has two."""
    spots: tuple[SpotReport, ...]
    seconds: float
    """Seconds from the start of the first shard to the end of the last one."""
    stop_s: float
    """Seconds from then until the last spot worker was idle."""

    @property
    def report(self) -> RolloutReport:
        """Sum of the reports of all shards."""
        return merge_reports([shard.value().report for shard in self.shards], self.seconds)

    def logged(self, step: int, kind: str) -> list[LoggedRollout]:
        """Return the speculation decisions of each shard, in the order of `shards`."""
        return [
            LoggedRollout(
                step=step,
                series=series,
                kind=kind,
                worker=shard.worker,
            )
            for shard in self.shards
            if (series := shard.value().series) is not None
        ]

    @property
    def drafted(self) -> dict[str, tuple[int, ...]]:
        """Accepted drafts by request, in characters of its text."""
        shards = [shard.value().drafted for shard in self.shards]
        return {name: places for drafted in shards for name, places in drafted.items()}

    @property
    def series(self) -> RolloutSeries | None:
        """Speculation decisions of the worker that was done last."""
        return self.shards[-1].value().series


def reused_share(spots: Sequence[SpotReport]) -> float:
    """Return the share of spot training tokens whose features the worker's engine had kept."""
    trained = sum(spot.num_tokens for spot in spots)
    return sum(spot.num_reused for spot in spots) / trained if trained else 0.0


@final
class RolloutCoordinator:
    """Runs one rollout. `learns`: shards come with the sums over their texts, if such are kept.

    `spot` is None if no drafter is trained by gradient on its texts.
    """

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        publisher: Publisher | None,
        spot: DrafterWork | None,
        on_progress: Callable[[Progress], None],
        *,
        learns: bool = False,
    ) -> None:
        self._supervisor, self._publisher, self._spot = supervisor, publisher, spot
        self._on_progress, self._learns = on_progress, learns
        self._waiting: list[list[Request]] = []
        """Shards without a worker."""
        self._running: dict[int, list[Request]] = {}
        """Shard of each generating worker."""
        self._completions: dict[str, Completion] = {}
        self._done: list[TaskResult[ShardResult]] = []

    def run(self, requests: Sequence[Request], expected: Mapping[str, float]) -> RolloutResult:
        """Generate all completions; `expected` holds the known length of groups, in tokens."""
        began = self._supervisor.now()
        self._waiting = _shards(requests, expected, self._supervisor.size)
        while self._waiting or self._running:
            self._start_shards()
            for worker in self._supervisor.workers(State.IDLE):
                if self._spot is not None and self._spot.gain_s(worker, self._forecast()) > 0.0:
                    self._spot.start(worker)
            for ended in self._supervisor.wait(_POLL_S):
                self._on_ended(ended)
            self._poll()
        done = self._supervisor.now()
        self._stop_training()
        return RolloutResult(
            completions=tuple(self._completions[each.request_id] for each in requests),
            shards=tuple(self._done),
            spots=() if self._spot is None else tuple(self._spot.reports),
            seconds=done - began,
            stop_s=self._supervisor.now() - done,
        )

    def _start_shards(self) -> None:
        """Start waiting shards on idle workers; stop training workers for those that are left."""
        for worker in self._supervisor.workers(State.IDLE)[: len(self._waiting)]:
            self._offer_missed(worker)
            self._running[worker] = shard = self._waiting.pop(0)
            if self._spot is not None:
                self._spot.begin_shard(worker)
            self._supervisor.start(worker, tasks.GENERATE, shard, self._learns)
        for worker in self._supervisor.workers(State.SPOT)[: len(self._waiting)]:
            self._supervisor.stop(worker)

    def _forecast(self) -> Forecast:
        num = len(self._running)
        rest_s = 1.0 if num else 0.0
        return Forecast(
            num_workers=self._supervisor.size, num_generating=num, rest_s=rest_s, slowdown=0.0
        )

    def _offer_missed(self, worker: int) -> None:
        """Offer a worker the published drafter if it drafts with an older one."""
        if self._publisher is not None:
            version = self._supervisor.ask(worker, Worker.drafter_version)
            if version is not None and version < self._publisher.published.version:
                self._supervisor.tell(worker, Worker.offer, self._publisher.published)

    def _on_ended(self, ended: TaskResult[Any]) -> None:
        shard = self._running.pop(ended.worker, None)
        if ended.is_lost and self._spot is not None:
            self._spot.on_lost(ended.worker)
        if shard is None:
            if self._spot is not None:
                self._spot.on_ended(ended)
        elif ended.is_lost or isinstance(ended.error, Stopped):
            # NOTE: generators are never stopped; Stopped is left of an earlier spot training whose
            # `clear_stop` was not answered in time.
            self._waiting.append(shard)
        else:
            self._on_shard_done(shard, ended)

    def _on_shard_done(self, shard: Sequence[Request], ended: TaskResult[ShardResult]) -> None:
        completions = ended.value().completions
        self._done.append(ended)
        self._completions |= {each.request_id: each for each in completions}
        if self._spot is not None:
            self._spot.add_completions(shard, completions)
        if self._publisher is not None:
            self._publisher.record(self._supervisor.ask(ended.worker, Worker.drafter_version))

    def _poll(self) -> None:
        """Report the progress of the rollout; exchange texts and offers."""
        progress = self._supervisor.check_progress()
        if self._running:
            running = [each for worker, each in progress.items() if worker in self._running]
            self._on_progress(self._total(running))
            if self._spot is not None:
                self._spot.poll(progress.keys(), self._forecast())

    def _total(self, running: Sequence[Progress]) -> Progress:
        """Add up the shards that are done and those that are running."""
        done = [shard.value().report.num_generated for shard in self._done]
        drafts = [part.drafts for part in running if part.drafts is not None]
        return Progress(
            num_finished=len(self._completions) + sum(part.num_finished for part in running),
            num_generated=sum(done) + sum(part.num_generated for part in running),
            num_running=sum(part.num_running for part in running),
            drafts=any(drafts) if drafts else None,
            text=next((part.text for part in running if part.text), ""),
        )

    def _stop_training(self) -> None:
        """Stop spot training, and wait for its results for a bounded time."""
        while training := self._supervisor.workers(State.SPOT):
            for worker in training:
                self._supervisor.stop(worker)
            ends = self._supervisor.wait(_POLL_S)
            for ended in ends:
                self._on_ended(ended)
            if not ends:
                self._supervisor.check_progress()


def _shards(
    requests: Sequence[Request], expected: Mapping[str, float], num_workers: int
) -> list[list[Request]]:
    """Place the requests, in parts of groups; one shard for each worker that has any."""
    parts = []
    for _, members in groupby(requests, key=lambda each: each.group_id or each.request_id):
        group = list(members)
        length = expected.get(group[0].group_id)
        sizes = part_sizes(len(group), len(group[0].prompt_tokens), length, num_workers)
        parts += [PromptGroup(size=size, expected=length) for size in sizes]
    placed = place(parts, num_workers)
    return [[requests[index] for index in shard] for shard in placed if shard]
