"""One rollout by all workers: each generates a shard of the requests, and idle ones do other work.

    events: tasks that end, progress, finished texts
        |
        v
    forecast ---> who starts a shard, which requests move, what an idle worker does (`schedule`)
        |
        v
    starts, ends and messages (`work`): generate, learn ahead, train the drafter, lend cores

An idle worker gets the work that gains most for each second of it, or rests. Nothing waits for such
work: it is ended when the last text is written.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, final

from longtail.cluster.records import Progress
from longtail.cluster.result import RolloutResult
from longtail.cluster.schedule.forecast import RolloutForecast, Text
from longtail.cluster.schedule.moves import best_move
from longtail.cluster.schedule.placement import PromptGroup, part_sizes, place
from longtail.cluster.timeline import Mark
from longtail.cluster.work.drafter_publisher import Publisher
from longtail.cluster.work.drafter_training import DrafterWork
from longtail.cluster.work.generate import Generation
from longtail.cluster.work.idle import IdleCoordinator
from longtail.cluster.work.learning import LearningWork
from longtail.cluster.workers.processes import TaskResult
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.rl.data.requests import visit_of
from longtail.types import Completion, Request

POLL_S = 0.2
_SOON = 0.5
"""Share of the longest text's rest: groups that are finished by then are learned from before it."""
_SHARE_S = 1.0
"""Seconds between two forecasts of a move: a worker then works with what it was given."""


@final
@dataclass(kw_only=True)
class RolloutCoordinator:
    """Runs one rollout."""

    pool: WorkerPool
    forecast: RolloutForecast
    idle: IdleCoordinator
    hosts: Callable[[], Mapping[int, str]]
    """Returns the hosts of the workers, without any if no cores can be lent."""
    publisher: Publisher | None
    spot: DrafterWork | None
    learning: LearningWork | None
    on_texts: Callable[[Sequence[Completion]], None] | None
    """Takes finished texts as they come."""
    on_progress: Callable[[Progress], None]
    shares: bool
    """Whether requests move."""
    learns: bool
    """Whether shards come with the sums over their texts, if such are kept."""
    requests: Sequence[Request]
    expected: Mapping[str, float]
    """Known lengths of groups, in tokens."""
    marks: list[Mark] = field(default_factory=list)

    def run(self) -> RolloutResult:
        """Generate all completions."""
        began = self._shared_s = self.pool.now()
        speeds = [self.forecast.speeds.of(each) for each in self.pool.present] or [1.0]
        self.forecast.begin(len(speeds))
        generation = self._generation = Generation(
            self.pool,
            _shards(self.requests, self.expected, speeds),
            self._on_texts,
            learns=self.learns,
        )
        while generation.waiting or generation.held:
            self._start_shards()
            now, is_over = self.pool.now(), not generation.held
            self.idle.assign(self.forecast.now(now, is_over=is_over))
            for ended in self.pool.wait(POLL_S):
                self._on_ended(ended)
            self._poll()
        done = self.pool.now()
        self.idle.end_all()
        while self.pool.workers(State.SPOT):  # each has seconds to stop
            for ended in self.pool.watch(POLL_S):
                self._on_ended(ended)
        return RolloutResult(
            completions=tuple(generation.completions[each.request_id] for each in self.requests),
            shards=tuple(generation.done),
            spots=() if self.spot is None else tuple(self.spot.reports),
            seconds=done - began,
            num_moved=generation.num_moved,
            stolen_s=max(self.forecast.stolen_s, 0.0),
            slowest=min(speeds),
        )

    def _start_shards(self) -> None:
        """Start waiting shards on idle workers; others that lend or train end that for them."""
        num_waiting = len(self._generation.waiting)
        missing = max(num_waiting - len(self.pool.workers(State.IDLE)), 0)
        for worker in self._fastest(State.LENDING, State.SPOT)[:missing]:
            self.idle.end(worker)
        idle = self._fastest(State.IDLE)[:num_waiting]
        self._offer_missed(idle)
        for worker in idle:
            self._generation.start(worker)

    def _fastest(self, *states: State) -> list[int]:
        """Return the workers in each of the states, the fastest ones first."""
        speed_of = self.forecast.speeds.of
        found = (sorted(self.pool.workers(s), key=speed_of, reverse=True) for s in states)
        return [worker for workers in found for worker in workers]

    def _offer_missed(self, workers: Sequence[int]) -> None:
        """Offer the published drafter to the workers that draft with an older one."""
        if self.publisher is not None:
            new = self.publisher.published
            found = self.pool.ask_each(Worker.drafter_version, dict.fromkeys(workers, ()))
            late = [each for each, old in found.items() if old is not None and old < new.version]
            self.pool.ask_each(Worker.offer, dict.fromkeys(late, (new,)))

    def _on_ended(self, ended: TaskResult[Any]) -> None:
        if self.idle.on_ended(ended):
            return
        shard = self._generation.on_ended(ended)
        if shard is not None and self.publisher is not None:
            self.publisher.record(shard.drafter_version)

    def _on_texts(self, completions: Sequence[Completion]) -> None:
        for each in completions:
            self.forecast.lengths.record(visit_of(each.request_id), len(each.tokens))
        if self.spot is not None:
            self.spot.add_completions(completions)
        if self.on_texts is not None:
            self.on_texts(completions)

    def _poll(self) -> None:
        """Report the progress of the rollout; exchange texts, offers and requests."""
        progress = self.pool.check_progress()
        if not (held := self._generation.held):
            return
        running = {worker: each for worker, each in progress.items() if worker in held}
        beside = len(self.pool.workers(State.SPOT, State.AHEAD))
        now = self.pool.now()
        self.forecast.observe(running, now, beside)
        self.on_progress(self._generation.total(list(running.values())))
        self._generation.poll(running)
        if now - self._shared_s >= _SHARE_S:
            self._shared_s = now
            self._share(running, now)
        self.idle.poll(progress, self.forecast.now(now))

    def _share(self, running: Iterable[int], now: float) -> None:
        """Forecast the ends of all texts, and move requests if the step ends sooner by that."""
        lengths = self.pool.ask_each(Worker.lengths, dict.fromkeys(running, ()))
        loads = {each: self._texts_of(each, lengths.get(each, ())) for each in running}
        self.forecast.load(loads, now, self.hosts())
        if not self.shares or self._generation.moves:
            return
        takers = self._fastest(State.IDLE, State.LENDING, State.SPOT, State.AHEAD)
        move = best_move(loads, takers, self._early_s(loads), self.forecast)
        if move is not None and self._generation.move(move.source, move.target, move.names):
            text = f"{len(move.names)} requests to worker {move.target}: {move.gain_s:+.1f} s"
            self.marks.append(Mark(worker=move.source, at_s=self.pool.now(), name=text))

    def _early_s(self, loads: Mapping[int, Sequence[Text]]) -> float:
        """Return the seconds of learning that could be done before the last text is written."""
        if self.learning is None:
            return 0.0
        lefts: dict[str, float] = {}
        written: dict[str, int] = {}
        for each in (text for texts in loads.values() for text in texts):
            group = each.request.group_id
            lefts[group] = max(lefts.get(group, 0.0), each.left)
            written[group] = written.get(group, 0) + round(each.written + each.left)
        longest = max(lefts.values(), default=0.0)
        soon = sum(written[group] for group, left in lefts.items() if left < _SOON * longest)
        return self.learning.seconds_of(soon)

    def _texts_of(self, worker: int, lengths: Iterable[tuple[str, int]]) -> list[Text]:
        """Return the unfinished texts of a worker."""
        found = []
        for name, written in lengths:
            if (request := self._generation.held[worker].get(name)) is not None:
                known = self.expected.get(request.group_id)
                left = self.forecast.lengths.left(request, written, known)
                found.append(Text(request=request, written=written, left=left))
        return found


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
