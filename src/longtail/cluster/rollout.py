"""One rollout by all workers: each generates a shard of the requests, and idle ones do other work.

    shards ---> GENERATING ---> IDLE ---> other work (`idle`)   until the last text is written
                   |  |           ^          |
                   |  +--texts----|----------+  drafters ---> offers to those that still generate
                   +--requests that move (`sharing`)---> another worker, which goes on with them

Nothing waits for idle work: it is stopped when the last generator is done. What a worker did not
return is generated again: the same noise keys give the same texts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, final

from longtail.cluster import tasks
from longtail.cluster.drafter.publisher import Publisher
from longtail.cluster.forecast import RolloutForecast, Text
from longtail.cluster.idle import IdleCoordinator
from longtail.cluster.learning import LearningWork
from longtail.cluster.placement import PromptGroup, part_sizes, place
from longtail.cluster.pool import TaskResult
from longtail.cluster.records import Progress, ShardResult
from longtail.cluster.sharing import Move, best_move
from longtail.cluster.spot import DrafterWork
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.timeline import Mark
from longtail.cluster.worker import Stopped, Worker
from longtail.drafter.training.replica import SpotReport
from longtail.engine.report import RolloutReport, merge_reports
from longtail.engine.rollout_log import LoggedRollout, RolloutSeries
from longtail.rl.data.requests import visit_of
from longtail.types import Completion, Request

_POLL_S = 0.2
_SOON = 0.5
"""Share of the longest text's rest: groups that are finished by then are learned from before it."""
_SHARE_S = 1.0
"""Seconds between two forecasts of a move: a worker then works with what it was given."""


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
    """Seconds from then until the last worker that trained the drafter was idle."""
    num_moved: int = 0
    """Number of requests that moved to another worker."""
    stolen_s: float = 0.0
    """Seconds that the rollout lost to work beside it, as measured by the workers' speed."""
    slowest: float = 1.0
    """Speed of the slowest worker, as a share of the fastest one's."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutParts:
    """The parts of a rollout beside the workers."""

    forecast: RolloutForecast
    idle: IdleCoordinator
    publisher: Publisher | None = None
    spot: DrafterWork | None = None
    """The drafter's training by gradients, if there is any."""
    on_texts: Callable[[Sequence[Completion]], None] | None = None
    """Takes finished texts as they come."""
    learning: LearningWork | None = None
    """Learning from finished groups, if there is any."""
    shares: bool = False
    """Whether requests move."""
    learns: bool = False
    """Whether shards come with the sums over their texts, if such are kept."""


@final
class RolloutCoordinator:
    """Runs one rollout."""

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        parts: RolloutParts,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._supervisor, self._parts, self._on_progress = supervisor, parts, on_progress
        self._idle, self._spot, self._forecast = parts.idle, parts.spot, parts.forecast
        self._waiting: list[list[Request]] = []
        """Shards without a worker."""
        self._held: dict[int, dict[str, Request]] = {}
        """Requests of each generating worker, those that it has finished included."""
        self._begun: dict[str, Completion] = {}
        """Beginnings of the requests that moved."""
        self._moves: dict[str, Move] = {}
        """Requests that are asked for, and not yet returned."""
        self._num_known: dict[int, int] = {}
        """Number of finished texts that each worker has handed over in mid-rollout."""
        self._expected: Mapping[str, float] = {}
        self._completions: dict[str, Completion] = {}
        self._done: list[TaskResult[ShardResult]] = []
        self._shared_s = supervisor.now()
        self._num_moved = 0
        self.marks: list[Mark] = []

    def run(self, requests: Sequence[Request], expected: Mapping[str, float]) -> RolloutResult:
        """Generate all completions; `expected` holds the known length of groups, in tokens."""
        began = self._supervisor.now()
        speeds = [self._forecast.speeds.of(each) for each in self._supervisor.present] or [1.0]
        self._forecast.begin(len(speeds))
        self._expected = expected
        self._waiting = _shards(requests, expected, speeds)
        while self._waiting or self._held:
            self._start_shards()
            self._idle.assign(self._forecast.now(self._supervisor.now(), is_over=not self._held))
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
            num_moved=self._num_moved,
            stolen_s=max(self._forecast.stolen_s, 0.0),
            slowest=min(speeds),
        )

    # ---- shards

    def _start_shards(self) -> None:
        """Start waiting shards on idle workers; stop training workers for those that are left."""
        idle = self._fastest(State.IDLE)[: len(self._waiting)]
        self._offer_missed(idle)
        for worker in idle:
            shard = self._waiting.pop(0)
            self._held[worker] = {each.request_id: each for each in shard}
            self._num_known[worker] = 0
            if self._spot is not None:
                self._spot.begin_shard(worker)
            self._supervisor.start(
                worker, tasks.GENERATE, shard, self._parts.learns, self._begun_of(shard)
            )
        for worker in self._fastest(State.SPOT)[: len(self._waiting)]:
            self._supervisor.stop(worker)

    def _fastest(self, *states: State) -> list[int]:
        """Return the workers in each of the states, the fastest ones first."""
        speed_of = self._forecast.speeds.of
        found = (sorted(self._supervisor.workers(s), key=speed_of, reverse=True) for s in states)
        return [worker for workers in found for worker in workers]

    def _begun_of(self, shard: Sequence[Request]) -> list[Completion]:
        names = [each.request_id for each in shard]
        return [self._begun[name] for name in names if name in self._begun]

    def _offer_missed(self, workers: Sequence[int]) -> None:
        """Offer the published drafter to the workers that draft with an older one."""
        if self._parts.publisher is not None:
            new = self._parts.publisher.published
            found = self._supervisor.ask_each(Worker.drafter_version, dict.fromkeys(workers, ()))
            late = [each for each, old in found.items() if old is not None and old < new.version]
            self._supervisor.ask_each(Worker.offer, dict.fromkeys(late, (new,)))

    def _on_ended(self, ended: TaskResult[Any]) -> None:
        if self._idle.on_ended(ended) or ended.worker not in self._held:
            return
        self._take_released(ended.worker)
        self._moves = {n: move for n, move in self._moves.items() if move.source != ended.worker}
        held = self._held.pop(ended.worker)
        if not ended.is_lost and not isinstance(ended.error, Stopped):
            self._on_shard_done(held, ended)
            held = {name: held[name] for name in held.keys() - self._completions.keys()}
        # NOTE: generators are never stopped; Stopped is left of an earlier spot training whose
        # `clear_stop` was not answered in time. Of a lost worker even the finished texts are
        # written again: the sums over them are gone with it.
        if held:
            self._waiting.append(sorted(held.values(), key=lambda each: each.request_id))

    def _on_shard_done(self, held: Mapping[str, Request], ended: TaskResult[ShardResult]) -> None:
        shard = ended.value()
        completions = shard.completions
        self._done.append(ended)
        self._take(completions)
        if self._spot is not None:
            requests = [held[each.request_id] for each in completions]
            self._spot.add_completions(requests, completions)
        if self._parts.publisher is not None:
            self._parts.publisher.record(shard.drafter_version)

    def _take(self, completions: Sequence[Completion]) -> None:
        """Record finished texts; those that are known already are the same."""
        new = [each for each in completions if each.request_id not in self._completions]
        for each in new:
            self._completions[each.request_id] = each
            self._forecast.lengths.record(visit_of(each.request_id), len(each.tokens))
        if new and self._parts.on_texts is not None:
            self._parts.on_texts(new)

    # ---- during the rollout

    def _poll(self) -> None:
        """Report the progress of the rollout; exchange texts, offers and requests."""
        progress = self._supervisor.check_progress()
        if not self._held:
            return
        running = {worker: each for worker, each in progress.items() if worker in self._held}
        now, beside = self._supervisor.now(), len(self._idle.busy)
        self._forecast.observe(running, now, beside)
        self._on_progress(self._total(list(running.values())))
        self._exchange(running, now)
        self._idle.poll(progress.keys(), self._forecast.now(now))

    def _exchange(self, running: Mapping[int, Progress], now: float) -> None:
        """Take finished texts and requests that move; look for a move now and then."""
        if self._parts.on_texts is not None:
            known = {worker: self._num_known[worker] for worker in running}
            more = {w: (known[w],) for w, each in running.items() if each.num_finished > known[w]}
            for worker, found in self._supervisor.ask_each(Worker.completed, more).items():
                self._num_known[worker] += len(found)
                self._take(found)
        for worker in {move.source for move in self._moves.values()} & running.keys():
            self._take_released(worker)
        if now - self._shared_s < _SHARE_S:
            return
        self._shared_s = now
        lengths = self._supervisor.ask_each(Worker.lengths, dict.fromkeys(running, ()))
        loads = {each: self._texts_of(each, lengths.get(each, ())) for each in running}
        self._forecast.load(loads, now)
        if self._parts.shares and not self._moves:
            takers = self._fastest(State.IDLE, State.SPOT, State.AHEAD)
            move = best_move(loads, takers, self._early_s(loads), self._forecast)
            if move is not None:
                self._ask_for(move)

    def _early_s(self, loads: Mapping[int, Sequence[Text]]) -> float:
        """Return the seconds of learning that could be done before the last text is written."""
        if self._parts.learning is None:
            return 0.0
        lefts: dict[str, float] = {}
        written: dict[str, int] = {}
        for each in (text for texts in loads.values() for text in texts):
            group = each.request.group_id
            lefts[group] = max(lefts.get(group, 0.0), each.left)
            written[group] = written.get(group, 0) + round(each.written + each.left)
        longest = max(lefts.values(), default=0.0)
        soon = sum(written[group] for group, left in lefts.items() if left < _SOON * longest)
        return self._parts.learning.seconds_of(soon)

    def _texts_of(self, worker: int, lengths: Iterable[tuple[str, int]]) -> list[Text]:
        """Return the unfinished texts of a worker."""
        held, found = self._held[worker], []
        for name, written in lengths:
            if name in held:
                known = self._expected.get(held[name].group_id)
                left = self._forecast.lengths.left(held[name], written, known)
                found.append(Text(request=held[name], written=written, left=left))
        return found

    # ---- requests that move

    def _ask_for(self, move: Move) -> None:
        if self._supervisor.tell(move.source, Worker.release, move.names):
            self._moves |= dict.fromkeys(move.names, move)
            text = f"{len(move.names)} requests to worker {move.target}: {move.gain_s:+.1f} s"
            self.marks.append(Mark(worker=move.source, at_s=self._supervisor.now(), name=text))

    def _take_released(self, worker: int) -> None:
        """Hand on what a worker has returned; what it finished meanwhile stays with it."""
        asked = {name: move for name, move in self._moves.items() if move.source == worker}
        if not asked:
            return
        released = self._supervisor.ask(worker, Worker.drain_released) or []
        moved: dict[int, list[Request]] = {}
        for each in released:
            name = each.request_id
            self._begun[name] = each
            moved.setdefault(asked[name].target, []).append(self._held[worker].pop(name))
        if released or asked.keys() <= self._completions.keys():  # the others are finished
            self._moves = {name: m for name, m in self._moves.items() if m.source != worker}
        self._num_moved += len(released)
        for target, requests in moved.items():
            if target in self._held:
                self._held[target] |= {each.request_id: each for each in requests}
                self._supervisor.tell(target, Worker.add, requests, self._begun_of(requests))
            else:
                self._waiting.append(requests)

    def _total(self, running: Sequence[Progress]) -> Progress:
        """Add up the shards that are done and those that are running."""
        done = [shard.value().report.num_generated for shard in self._done]
        finished = sum(len(shard.value().completions) for shard in self._done)
        drafts = [part.drafts for part in running if part.drafts is not None]
        return Progress(
            num_finished=finished + sum(part.num_finished for part in running),
            num_generated=sum(done) + sum(part.num_generated for part in running),
            num_running=sum(part.num_running for part in running),
            drafts=any(drafts) if drafts else None,
            text=next((part.text for part in running if part.text), ""),
        )

    def _stop_training(self) -> None:
        """Stop spot training, and wait for its results for a bounded time."""
        self._idle.stop()
        while self._supervisor.workers(State.SPOT):
            ends = self._supervisor.wait(_POLL_S)
            for ended in ends:
                self._on_ended(ended)
            if not ends:
                self._supervisor.check_progress()


def _shards(
    requests: Sequence[Request], expected: Mapping[str, float], speeds: Sequence[float]
) -> list[list[Request]]:
    """Place the requests, in parts of groups; one shard for each worker that has any.

    The shard of the fastest worker comes first, as `_start_shards` takes them.
    """
    parts = []
    for _, members in groupby(requests, key=lambda each: each.group_id or each.request_id):
        group = list(members)
        length = expected.get(group[0].group_id)
        sizes = part_sizes(len(group), len(group[0].prompt_tokens), length, len(speeds))
        parts += [PromptGroup(size=size, expected=length) for size in sizes]
    placed = sorted(zip(speeds, place(parts, speeds), strict=True), key=lambda each: -each[0])
    return [[requests[index] for index in shard] for _, shard in placed if shard]
