"""What idle workers make of a rollout: they train the drafter on its texts while others generate.

    GENERATING --written--> stream --feed--> SPOT --candidate--> publisher --offer--> GENERATING
         (a text as far as it is)      (an idle worker)       (if it is better)

Nothing here is waited for, and nothing that happens here ends a run: a replica that comes to
nothing is noted, and its worker rests until the rollout is over.
"""

from collections.abc import Collection, Sequence
from typing import final

from longtail.cluster.pool import TaskResult
from longtail.cluster.publisher import Publisher
from longtail.cluster.states import State
from longtail.cluster.stream import TextStream
from longtail.cluster.supervisor import UNHEARD, WorkerSupervisor
from longtail.cluster.timeline import Mark
from longtail.cluster.worker import Worker
from longtail.drafter.training.buffer import DrafterBuffer, TextSnapshot
from longtail.drafter.training.spot import Replica, SpotEnd, SpotReport
from longtail.types import Completion, Request

LOOK_S = 1.0
"""Between two looks at what is being written."""
OFFER_S = 4.0
"""Between two offers in mid-rollout: each costs everybody a look at a batch of texts."""


@final
class SpotCoordinator:
    """One rollout's texts, and the replicas that were trained on them.

    `lends`: idle workers train meanwhile; otherwise texts are only collected.
    """

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        publisher: Publisher,
        buffer: DrafterBuffer,
        *,
        step: int,
        lends: bool,
    ) -> None:
        self._supervisor, self._publisher, self._step, self._lends = (
            supervisor,
            publisher,
            step,
            lends,
        )
        self._texts = TextStream(buffer, step)
        self._replicas: dict[int, Replica] = {}
        self._num_finished: dict[int, int] = {}
        """Of each generator's shard, how many finished texts were taken in."""
        self._resting: set[int] = set()
        """Found that training does not pay any more."""
        self._starved: set[int] = set()
        """Had nothing to learn from; they wait for news."""
        self._looked = self._offered = supervisor.clock()
        self.spots: list[SpotReport] = []
        self.marks: list[Mark] = []
        publisher.begin()

    @property
    def replicas(self) -> list[Replica]:
        """What was made of the drafter."""
        return list(self._replicas.values())

    # ---- texts

    def begin_shard(self, worker: int) -> None:
        """Note that a worker begins to write."""
        self._num_finished[worker] = 0

    def take(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Take in the texts of a shard."""
        asked = {request.request_id: request for request in requests}
        self._texts.take(
            TextSnapshot.of(asked[each.request_id], each, self._step) for each in completions
        )

    def feed(self, worker: int) -> None:
        """Send a worker the texts that it has not had."""
        news = self._texts.news(worker)
        if news and self._supervisor.asked(worker, Worker.feed, UNHEARD, news) is not UNHEARD:
            self._texts.told(worker)

    # ---- training

    def lend(self) -> None:
        """Have idle workers train while somebody generates, if there is something to learn."""
        states = self._supervisor.states
        if not (self._lends and self._texts.has_texts and states.workers(State.GENERATING)):
            return
        for worker in states.workers(State.IDLE):
            if worker in self._starved and self._texts.news(worker):
                self._starved.discard(worker)
            if worker not in self._resting | self._starved:
                self.feed(worker)
                published = self._publisher.published
                self._supervisor.start(worker, State.SPOT, Worker.spot, published)

    def note(self, ended: TaskResult) -> None:
        """Take the end of a stretch of training."""
        worker = ended.worker
        if ended.error is not None:
            self._discard(worker, 0, f"{type(ended.error).__name__}: {ended.error}")
            return
        report: SpotReport = ended.result
        self.spots.append(report)
        if report.replica is not None:
            self._replicas[worker] = report.replica
        if report.reason is SpotEnd.NOT_FINITE:
            self._discard(worker, report.num_tokens, "it is not finite")
        elif report.reason is SpotEnd.NO_GAIN:
            self._resting.add(worker)
        elif report.reason is SpotEnd.NO_TEXTS:
            self._starved.add(worker)

    def lose(self, worker: int) -> None:
        """Note that a worker begins anew."""
        self._texts.forget(worker)
        self._resting.discard(worker)
        self._starved.discard(worker)

    def _discard(self, worker: int, num_tokens: int, reason: str) -> None:
        self._supervisor.log(f"worker {worker}: its drafter is discarded: {reason}")
        self._publisher.discard(num_tokens, reason)
        self._resting.add(worker)

    # ---- in mid-rollout

    def look(self, answering: Collection[int]) -> None:
        """Now and then stream texts to those who train, and what they made to those who generate.

        `answering`: who answered just now; nobody else is asked.
        """
        states, now = self._supervisor.states, self._supervisor.clock()
        training = [each for each in states.workers(State.SPOT) if each in answering]
        if not (training or self._starved) or now - self._looked < LOOK_S:
            return
        self._looked = now
        generating = [each for each in states.workers(State.GENERATING) if each in answering]
        self._stream(generating, training)
        if now - self._offered > OFFER_S:
            self._offered = now
            self._offer(generating, training)
        for worker in generating:
            self._publisher.note(self._supervisor.asked(worker, Worker.verdicts, []))

    def _stream(self, generating: Sequence[int], training: Sequence[int]) -> None:
        for worker in generating:
            first = self._num_finished[worker]
            texts: list[TextSnapshot] = self._supervisor.asked(
                worker, Worker.written, [], self._step, first
            )
            self._num_finished[worker] += sum(text.is_finished for text in texts)
            self._texts.take(texts)
        for worker in training:
            self.feed(worker)

    def _offer(self, generating: Sequence[int], training: Sequence[int]) -> None:
        found = [self._supervisor.asked(worker, Worker.candidate, None) for worker in training]
        offer = self._publisher.offer([each for each in found if each is not None])
        if offer is None:
            return
        version, now = offer.weights.version, self._supervisor.clock()
        for worker in generating:
            self._supervisor.asked(worker, Worker.offer, None, offer)
            self._publisher.told(worker, version)
            self.marks.append(Mark(worker=worker, at_s=now, name=f"drafter v{version} offered"))
