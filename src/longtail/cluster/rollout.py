"""One rollout by all workers: shards out, texts in, and whoever is done early trains the drafter.

    shards ---> GENERATING ---> IDLE ---> SPOT  until the last generator is done
                   |  texts       ^         |
                   +--------------|---------+  candidates ---> offers to those that still generate

Nothing waits for spot training (`spot`): it is told to stop when nobody generates, and who does
not within a few seconds is replaced. A shard whose worker is lost is handed out again, whole: the
same keys write the same texts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import final

from longtail.cluster.placement import PromptGroup, place
from longtail.cluster.pool import TaskResult
from longtail.cluster.publisher import Publisher
from longtail.cluster.records import Progress, Served
from longtail.cluster.spot import SpotCoordinator
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.worker import Stopped, Worker
from longtail.drafter.training.spot import SpotReport
from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import LoggedRollout, RolloutSeries
from longtail.tuner.cost import CostModel
from longtail.types import Completion, Request

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A worker's share of a rollout; who took over a lost one's has two.

    Example: Share(worker=1, served=served)
    """

    worker: int
    served: Served


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """What came of a rollout."""

    completions: tuple[Completion, ...]
    """In the order of the requests."""
    served: tuple[Share, ...]
    """In the order in which they were done."""
    spots: tuple[SpotReport, ...]
    seconds: float
    """From handing out the first shard to the end of the last one."""
    stop_s: float
    """From then until the last spot worker was free."""

    @property
    def reused_share(self) -> float:
        """Of the tokens that spot training learned, those whose features its engine had."""
        learned = sum(spot.num_tokens for spot in self.spots)
        return sum(spot.num_reused for spot in self.spots) / learned if learned else 0.0

    @property
    def report(self) -> RolloutReport:
        """Sum up what the workers report."""
        return merge_reports([share.served.report for share in self.served], self.seconds)

    def logged(self, step: int, kind: str) -> list[LoggedRollout]:
        """Return what each worker decided, in the order in which they were done."""
        return [
            LoggedRollout(
                step=step,
                series=share.served.series,
                kind=kind,
                worker=share.worker,
                costs=share.served.known_costs,
            )
            for share in self.served
            if share.served.series is not None
        ]

    @property
    def costs(self) -> CostModel | None:
        """What steps cost the worker that was done last."""
        numbers = self.served[-1].served.costs
        return None if numbers is None else CostModel.of(numbers)

    @property
    def series(self) -> RolloutSeries | None:
        """Of the worker that was done last."""
        return self.served[-1].served.series


@final
class Rollout:
    """Runs one rollout; made anew for each.

    `spot` is None where texts are not to be learned from.
    """

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        publisher: Publisher | None,
        spot: SpotCoordinator | None,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._supervisor, self._publisher, self._spot = supervisor, publisher, spot
        self._on_progress = on_progress
        self._waiting: list[list[Request]] = []
        """Shards that nobody has."""
        self._shards: dict[int, list[Request]] = {}
        """Of those that generate."""
        self._completions: dict[str, Completion] = {}
        self._served: list[Share] = []

    def run(self, requests: Sequence[Request], expected: Mapping[str, float]) -> RolloutResult:
        """Serve all requests; `expected` says how long what group was in earlier epochs."""
        clock = self._supervisor.clock
        began = clock()
        self._waiting = _shards(requests, expected, self._supervisor.pool.size)
        while self._waiting or self._shards:
            self._hand_out()
            if self._spot is not None:
                self._spot.lend()
            for ended in self._supervisor.wait(_POLL_S):
                self._note(ended)
            self._look()
        done = clock()
        self._recall()
        return RolloutResult(
            completions=tuple(self._completions[each.request_id] for each in requests),
            served=tuple(self._served),
            spots=() if self._spot is None else tuple(self._spot.spots),
            seconds=done - began,
            stop_s=clock() - done,
        )

    def _hand_out(self) -> None:
        """Give waiting shards to idle workers; for others, fetch workers back from training."""
        states = self._supervisor.states
        for worker in states.workers(State.IDLE)[: len(self._waiting)]:
            self._catch_up(worker)
            self._shards[worker] = shard = self._waiting.pop(0)
            if self._spot is not None:
                self._spot.begin_shard(worker)
            self._supervisor.start(worker, State.GENERATING, Worker.generate, shard)
        for worker in states.workers(State.SPOT)[: len(self._waiting)]:
            self._supervisor.stop(worker)

    def _catch_up(self, worker: int) -> None:
        """Offer the published drafter to who has missed it."""
        if self._publisher is None:
            return
        if worker in self._supervisor.newcomers:
            self._supervisor.newcomers.discard(worker)
            self._publisher.forget(worker)
        offer = self._publisher.missed_by(worker)
        if offer is not None:
            self._supervisor.asked(worker, Worker.offer, None, offer)

    def _note(self, ended: TaskResult) -> None:
        """Take a task's end."""
        worker = ended.worker
        shard = self._shards.pop(worker, None)
        if ended.is_lost and self._spot is not None:
            self._spot.lose(worker)
        if shard is None:
            if self._spot is not None and not ended.is_lost:
                self._spot.note(ended)
        elif ended.is_lost or isinstance(ended.error, Stopped):
            # NOTE: nobody stops generators; one that has not heard yet to go on again says so.
            self._waiting.append(shard)
        else:
            self._take(worker, shard, ended.value())

    def _take(self, worker: int, shard: Sequence[Request], served: Served) -> None:
        self._served.append(Share(worker=worker, served=served))
        self._completions |= {each.request_id: each for each in served.completions}
        if self._spot is not None:
            self._spot.take(shard, served.completions)
        if self._publisher is not None:
            self._publisher.note(self._supervisor.asked(worker, Worker.verdicts, []))

    def _look(self) -> None:
        """See how far everybody is."""
        progress = self._supervisor.look()
        if self._shards:
            running = [each for worker, each in progress.items() if worker in self._shards]
            self._on_progress(self._total(running))
            if self._spot is not None:
                self._spot.look(progress.keys())

    def _total(self, running: Sequence[Progress]) -> Progress:
        """Add up what is done and what is on its way."""
        done = [share.served.report.num_generated for share in self._served]
        drafts = [part.drafts for part in running if part.drafts is not None]
        return Progress(
            num_finished=len(self._completions) + sum(part.num_finished for part in running),
            num_generated=sum(done) + sum(part.num_generated for part in running),
            num_running=sum(part.num_running for part in running),
            drafts=any(drafts) if drafts else None,
        )

    def _recall(self) -> None:
        """Have spot workers stop; wait for them, for a bounded time."""
        while training := self._supervisor.states.workers(State.SPOT):
            for worker in training:
                self._supervisor.stop(worker)
            ends = self._supervisor.wait(_POLL_S)
            for ended in ends:
                self._note(ended)
            if not ends:
                self._supervisor.look()


def _shards(
    requests: Sequence[Request], expected: Mapping[str, float], num_workers: int
) -> list[list[Request]]:
    """Place the requests, siblings together; an entry for each worker that has any."""
    groups = [len(list(group)) for _, group in groupby(requests, key=_group)]
    firsts = [0, *accumulate(groups)][:-1]
    siblings = [
        PromptGroup(size=size, expected=expected.get(requests[first].group_id))
        for first, size in zip(firsts, groups, strict=True)
    ]
    placed = place(siblings, num_workers)
    return [[requests[index] for index in share] for share in placed if share]


def _group(request: Request) -> str:
    return request.group_id or request.request_id
