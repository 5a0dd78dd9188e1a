"""One rollout by all workers: shards out, texts in, and whoever is done early trains the drafter.

    shards ---> GENERATING ---> IDLE ---> SPOT  until the last generator is done
                   |  texts       ^         |
                   +--------------|---------+  candidates ---> offers to those that still generate

Nothing waits for spot training: it is told to stop when nobody generates, and who does not within
a few seconds is replaced. A shard whose worker is lost is handed out again, whole: the same keys
write the same texts.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, final

from longtail.cluster.crew import Ended
from longtail.cluster.placement import Siblings, place
from longtail.cluster.publisher import Publisher
from longtail.cluster.roster import State
from longtail.cluster.shift import Shift
from longtail.cluster.worker import Progress, Served, Worker
from longtail.drafter.buffer import DrafterBuffer, Written
from longtail.drafter.spot import Replica, SpotEnd, SpotReport
from longtail.engine.report import RolloutReport, together
from longtail.errors import ClusterError
from longtail.rollout_log import LoggedRollout, RolloutSeries
from longtail.tuner.cost import CostModel
from longtail.types import Completion, Request

_POLL_S = 0.2
_LOOK_S = 1.0
"""Between two looks at texts and candidates."""
_OFFER_S = 4.0
"""Between two offers in mid-rollout: each costs everybody a look at a batch of texts."""
_STOP_S = 15.0
"""For a spot worker to stop: a micro-step is far shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rolled:
    """What came of a rollout."""

    completions: tuple[Completion, ...]
    """In the order of the requests."""
    served: Mapping[int, Served]
    """By worker, in the order in which they were done; of several shards the last."""
    spots: tuple[SpotReport, ...]
    seconds: float
    """From handing out the first shard to the end of the last one."""
    stop_s: float
    """From then until the last spot worker was free."""

    @property
    def report(self) -> RolloutReport:
        """Sum up what the workers report."""
        return together([served.report for served in self.served.values()], self.seconds)

    def logged(self, step: int, kind: str) -> list[LoggedRollout]:
        """Return what each worker decided, in the order in which they were done."""
        return [
            LoggedRollout(
                step=step, series=each.series, kind=kind, worker=worker, costs=each.known_costs
            )
            for worker, each in self.served.items()
            if each.series is not None
        ]

    @property
    def costs(self) -> CostModel | None:
        """What steps cost the worker that was done last."""
        numbers = list(self.served.values())[-1].costs
        return None if numbers is None else CostModel.of(numbers)

    @property
    def series(self) -> RolloutSeries | None:
        """Of the worker that was done last."""
        return list(self.served.values())[-1].series


@final
class Rollout:
    """Runs one rollout on a shift; made anew for each."""

    def __init__(
        self,
        shift: Shift,
        publisher: Publisher | None,
        buffer: DrafterBuffer,
        listen: Callable[[Progress], None],
        *,
        step: int,
        harvests: bool,
    ) -> None:
        self._shift, self._publisher, self._buffer = shift, publisher, buffer
        self._listen, self._step = listen, step
        self._harvests = harvests and publisher is not None
        self._shards: dict[int, list[Request]] = {}
        """Of those that generate."""
        self._waiting: list[list[Request]] = []
        self._completions: dict[str, Completion] = {}
        self._served: dict[int, Served] = {}
        self._spots: list[SpotReport] = []
        self._replicas: dict[int, Replica] = {}
        self._known: dict[int, int] = {}
        """Finished texts of each worker's shard that are in the buffer."""
        self._fed: dict[int, int] = {}
        self._texts: list[Written] = []
        self._resting: set[int] = set()
        """Workers that found that training no longer pays."""
        self._progress: dict[int, Progress] = {}
        self._looked = self._offered = time.monotonic()

    def run(self, requests: Sequence[Request], expected: Mapping[str, float]) -> Rolled:
        """Serve all requests; `expected` says how long what group was in earlier epochs."""
        began = time.perf_counter()
        groups = [len(list(group)) for _, group in groupby(requests, key=_group)]
        firsts = [0, *accumulate(groups)][:-1]
        siblings = [
            Siblings(size=size, expected=expected.get(requests[first].group_id))
            for first, size in zip(firsts, groups, strict=True)
        ]
        placed = place(siblings, self._shift.crew.size)
        self._waiting = [[requests[index] for index in share] for share in placed if share]
        while self._waiting or self._shards:
            self._hand_out()
            self._harvest()
            for ended in self._shift.wait(_POLL_S):
                self._note(ended)
            if self._shards:
                self._look()
        seconds = time.perf_counter() - began
        self._recall()
        return Rolled(
            completions=tuple(self._completions[each.request_id] for each in requests),
            served=dict(self._served),
            spots=tuple(self._spots),
            seconds=seconds,
            stop_s=time.perf_counter() - began - seconds,
        )

    @property
    def texts(self) -> list[Written]:
        """What was written, as it came in."""
        return self._texts

    @property
    def replicas(self) -> list[Replica]:
        """What spot workers made of the drafter, as far as it was not offered yet."""
        return list(self._replicas.values())

    def abandon(self) -> None:
        """Have everybody stop, as soon as may be: the user wants to."""
        for worker in self._shift.roster.workers(State.GENERATING, State.SPOT):
            self._shift.crew.ask(worker, Worker.stop)
        deadline = time.monotonic() + _STOP_S
        while self._shift.roster.workers(State.GENERATING, State.SPOT):
            self._shift.wait(_POLL_S)
            if time.monotonic() > deadline:
                return

    # ---- handing out

    def _hand_out(self) -> None:
        """Give waiting shards to idle workers; if there are none, fetch one back from training."""
        roster = self._shift.roster
        for worker in roster.workers(State.IDLE):
            if self._waiting:
                shard = self._waiting.pop(0)
                self._shards[worker] = shard
                self._known[worker] = 0
                self._progress.pop(worker, None)
                self._catch_up(worker)
                self._shift.start(worker, State.GENERATING, Worker.generate, shard)
        if self._waiting:
            for worker in roster.workers(State.SPOT)[: len(self._waiting)]:
                self._shift.crew.ask(worker, Worker.stop)

    def _catch_up(self, worker: int) -> None:
        """Offer the published drafter to a worker that began anew."""
        if worker in self._shift.newcomers:
            self._shift.newcomers.discard(worker)
            if self._publisher is not None:
                self._shift.crew.ask(worker, Worker.offer, self._publisher.present())

    def _harvest(self) -> None:
        """Have idle workers train while somebody generates and there is something to learn."""
        if not self._harvests or not self._shards or self._publisher is None:
            return
        for worker in self._shift.roster.workers(State.IDLE):
            if worker not in self._resting and self._buffer.num_texts:
                self._feed(worker)
                published = self._publisher.published
                self._shift.start(worker, State.SPOT, Worker.spot, published)

    def _feed(self, worker: int) -> None:
        """Send a worker the texts that it has not had."""
        first = self._fed.get(worker, 0)
        if first < len(self._texts):
            self._shift.crew.ask(worker, Worker.feed, self._texts[first:])
            self._fed[worker] = len(self._texts)

    # ---- what comes back

    def _note(self, ended: Ended) -> None:
        """Take a task's end."""
        worker = ended.worker
        shard = self._shards.pop(worker, None)
        if ended.is_lost:
            self._replicas.pop(worker, None)
            self._fed.pop(worker, None)
            if shard is not None:
                self._waiting.append(shard)
            return
        result: Any = ended.value()
        if isinstance(result, Served):
            assert shard is not None, "served what it was given"
            self._served.pop(worker, None)
            self._served[worker] = result
            self._completions |= {each.request_id: each for each in result.completions}
            self._learn_texts(shard, result.completions)
        elif isinstance(result, SpotReport):
            self._spots.append(result)
            if result.replica is not None:
                self._replicas[worker] = result.replica
            if result.reason is not SpotEnd.STOPPED:
                self._resting.add(worker)

    def _learn_texts(self, shard: Sequence[Request], completions: Sequence[Completion]) -> None:
        prompts = {each.request_id: each.prompt_tokens for each in shard}
        self._take(
            [
                Written(
                    request_id=each.request_id,
                    tokens=(*prompts[each.request_id], *each.tokens),
                    prompt_len=len(prompts[each.request_id]),
                    step=self._step,
                    is_finished=True,
                )
                for each in completions
            ]
        )

    def _take(self, texts: Sequence[Written]) -> None:
        if self._publisher is not None:
            self._buffer.add(texts)
            self._texts.extend(texts)

    def _look(self) -> None:
        """Ask how far everybody is; now and then stream texts in and offer what was trained."""
        crew, roster = self._shift.crew, self._shift.roster
        for worker in self._shift.hanging(set(roster.workers(State.GENERATING, State.SPOT))):
            self._shift.lose(worker, f"worker {worker} has made no step for too long")
            self._note(Ended(worker=worker, is_lost=True))
        for worker in roster.workers(State.GENERATING):
            self._progress[worker] = self._asked(worker, Worker.progress, Progress())
        self._listen(_total(list(self._progress.values())))
        now = time.monotonic()
        training = roster.workers(State.SPOT)
        if not training or now - self._looked < _LOOK_S:
            return
        self._looked = now
        for worker in roster.workers(State.GENERATING):
            texts = self._asked(worker, Worker.written, [], self._step, self._known[worker])
            self._known[worker] += sum(text.is_finished for text in texts)
            self._take(texts)
        for worker in training:
            self._feed(worker)
        if now - self._offered > _OFFER_S and self._publisher is not None:
            self._offered = now
            found = [self._asked(worker, Worker.candidate, None) for worker in training]
            ready = [each for each in found if each is not None]
            offer = self._publisher.offer(ready) if ready else None
            if offer is not None:
                for worker in roster.workers(State.GENERATING):
                    crew.ask(worker, Worker.offer, offer)
        for worker in roster.workers(State.GENERATING):
            if self._publisher is not None:
                self._publisher.note(self._asked(worker, Worker.verdicts, []))

    def _asked(self, worker: int, message: Callable[..., Any], otherwise: Any, *args: Any) -> Any:
        """Ask a worker that may be gone: then its task ends, too, and is noted there."""
        try:
            return self._shift.crew.ask(worker, message, *args)
        except ClusterError:
            return otherwise

    def _recall(self) -> None:
        """Have spot workers stop; wait for them, for a bounded time."""
        roster = self._shift.roster
        for worker in roster.workers(State.SPOT):
            self._asked(worker, Worker.stop, None)
        deadline = time.monotonic() + _STOP_S
        while training := roster.workers(State.SPOT):
            for ended in self._shift.wait(_POLL_S):
                self._note(ended)
            if time.monotonic() > deadline:
                for worker in training:
                    if roster.state(worker) is State.SPOT:
                        self._shift.lose(worker, f"worker {worker} did not stop training")
                        self._note(Ended(worker=worker, is_lost=True))


def _group(request: Request) -> str:
    return request.group_id or request.request_id


def _total(parts: Sequence[Progress]) -> Progress:
    drafts = [part.drafts for part in parts if part.drafts is not None]
    return Progress(
        num_finished=sum(part.num_finished for part in parts),
        num_generated=sum(part.num_generated for part in parts),
        num_running=sum(part.num_running for part in parts),
        drafts=any(drafts) if drafts else None,
    )
