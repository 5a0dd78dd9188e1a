"""Spot training: idle workers train the drafter on the texts of a rollout while others generate.

    GENERATING --texts--> stream --> SPOT --candidate--> publisher --offer--> GENERATING
       (finished and unfinished)   (idle workers)     (if it is better)

Nothing waits for spot training, and no failure of it ends a run: a replica that cannot be used is
recorded, and its worker trains no more in this rollout.
"""

from collections.abc import Callable, Collection, Sequence
from typing import final

from longtail.cluster import tasks
from longtail.cluster.drafter.publisher import Publisher
from longtail.cluster.drafter.texts import TextStream
from longtail.cluster.pool import TaskResult
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.timeline import Mark
from longtail.cluster.worker import Worker
from longtail.drafter.training.buffer import DrafterBuffer, TextSnapshot
from longtail.drafter.training.replica import Replica, SpotEnd, SpotReport
from longtail.types import Completion, Request

POLL_S = 1.0
"""Seconds between two polls of the generated texts."""
OFFER_S = 4.0
"""Seconds between two offers during a rollout: every worker measures each offer."""


@final
class SpotCoordinator:
    """The texts of one rollout, and the replicas trained on them.

    `trains_idle`: idle workers train during the rollout; otherwise texts are only collected.
    """

    def __init__(
        self,
        supervisor: WorkerSupervisor,
        publisher: Publisher,
        buffer: DrafterBuffer,
        *,
        step: int,
        trains_idle: bool,
        log: Callable[[str], None],
    ) -> None:
        self._supervisor, self._publisher = supervisor, publisher
        self._step, self._trains_idle, self._log = step, trains_idle, log
        self._texts = TextStream(buffer, step)
        self._replicas: dict[int, Replica] = {}
        self._num_finished: dict[int, int] = {}
        """Number of finished texts collected from each generating worker's shard."""
        self._is_done: set[int] = set()
        """Workers whose training has failed, or no longer pays."""
        self._without_texts: set[int] = set()
        """Workers that had no text to train on; they wait for new ones."""
        self._polled_s = self._offered_s = supervisor.now()
        self.reports: list[SpotReport] = []
        self.marks: list[Mark] = []
        publisher.begin_rollout()

    @property
    def replicas(self) -> list[Replica]:
        """Newest replica of each worker that trained."""
        return list(self._replicas.values())

    # ---- texts

    def begin_shard(self, worker: int) -> None:
        """Record that a worker begins to generate a shard."""
        self._num_finished[worker] = 0

    def add_completions(
        self, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> None:
        """Add the texts of a shard."""
        by_id = {request.request_id: request for request in requests}
        self._texts.add(
            TextSnapshot.of(by_id[each.request_id], each, self._step) for each in completions
        )

    def send_texts(self, worker: int) -> None:
        """Send a worker the texts that it does not have."""
        unsent = self._texts.unsent(worker)
        if unsent and self._supervisor.tell(worker, Worker.add_texts, unsent):
            self._texts.mark_sent(worker)

    # ---- training

    def start_idle(self) -> None:
        """Start training on idle workers if others generate and there are texts."""
        is_possible = self._trains_idle and self._texts.has_texts
        if not (is_possible and self._supervisor.workers(State.GENERATING)):
            return
        for worker in self._supervisor.workers(State.IDLE):
            if worker in self._without_texts and self._texts.unsent(worker):
                self._without_texts.discard(worker)
            if worker not in self._is_done | self._without_texts:
                self.send_texts(worker)
                self._supervisor.start(worker, tasks.TRAIN_DRAFTER, self._publisher.published)

    def on_trained(self, ended: TaskResult[SpotReport]) -> None:
        """Record the end of a worker's training."""
        worker = ended.worker
        if ended.error is not None:
            self._discard(worker, 0, f"{type(ended.error).__name__}: {ended.error}")
            return
        report = ended.value()
        self.reports.append(report)
        if report.replica is not None:
            self._replicas[worker] = report.replica
        if report.reason is SpotEnd.NOT_FINITE:
            self._discard(worker, report.num_tokens, "it is not finite")
        elif report.reason is SpotEnd.NO_GAIN:
            self._is_done.add(worker)
        elif report.reason is SpotEnd.NO_TEXTS:
            self._without_texts.add(worker)

    def on_worker_lost(self, worker: int) -> None:
        """Forget what a lost worker had; its replacement may train."""
        self._texts.forget(worker)
        self._is_done.discard(worker)
        self._without_texts.discard(worker)

    def _discard(self, worker: int, num_tokens: int, reason: str) -> None:
        self._log(f"worker {worker}: its drafter is discarded: {reason}")
        self._publisher.record_discarded(num_tokens, reason)
        self._is_done.add(worker)

    # ---- exchange during the rollout

    def poll(self, answering: Collection[int]) -> None:
        """Send new texts to workers that train, and offer their drafters to those that generate.

        Does nothing until `POLL_S` after the last poll. Only workers in `answering` are asked.
        """
        now = self._supervisor.now()
        training = [each for each in self._supervisor.workers(State.SPOT) if each in answering]
        if not (training or self._without_texts) or now - self._polled_s < POLL_S:
            return
        self._polled_s = now
        generating = [w for w in self._supervisor.workers(State.GENERATING) if w in answering]
        self._exchange_texts(generating, training)
        if now - self._offered_s > OFFER_S:
            self._offered_s = now
            self._offer(generating, training)
        for worker in generating:
            adopted = self._supervisor.ask(worker, Worker.drain_adopted)
            self._publisher.record(adopted or [])

    def _exchange_texts(self, generating: Sequence[int], training: Sequence[int]) -> None:
        for worker in generating:
            first = self._num_finished[worker]
            texts = self._supervisor.ask(worker, Worker.texts, self._step, first) or []
            self._num_finished[worker] += sum(text.is_finished for text in texts)
            self._texts.add(texts)
        for worker in training:
            self.send_texts(worker)

    def _offer(self, generating: Sequence[int], training: Sequence[int]) -> None:
        found = [self._supervisor.ask(worker, Worker.candidate) for worker in training]
        offer = self._publisher.offer([each for each in found if each is not None])
        if offer is None:
            return
        version, now = offer.version, self._supervisor.now()
        for worker in generating:
            self._supervisor.tell(worker, Worker.offer, offer)
            self._publisher.mark_offered(worker, version)
            self.marks.append(Mark(worker=worker, at_s=now, name=f"drafter v{version} offered"))
