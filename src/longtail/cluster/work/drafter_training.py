"""Drafter training as idle work: workers train the drafter on the texts of a rollout.

    GENERATING --texts--> buffer --> SPOT --candidate--> publisher --offer--> GENERATING
       (finished and unfinished)   (idle workers)     (if it is better)

Nothing waits for it, and no failure of it ends a run: a replica that cannot be used is recorded,
and its worker trains no more in this rollout.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import final

from longtail.cluster.records import Forecast
from longtail.cluster.work.drafter_versions import DrafterVersions
from longtail.cluster.work.idle import IdleWork
from longtail.cluster.workers.processes import TaskResult
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.training.buffer import TextSnapshot
from longtail.drafter.training.replica import Replica, SpotEnd, SpotReport
from longtail.types import Completion, Request

_POLL_S = 1.0
"""Seconds between two polls: each copies the tokens of all unfinished requests."""


@final
class DrafterWork(IdleWork):
    """The texts of one rollout, and the replicas trained on them."""

    def __init__(
        self,
        pool: WorkerPool,
        versions: DrafterVersions,
        requests: Iterable[Request],
        *,
        step: int,
        log: Callable[[str], None],
    ) -> None:
        self._pool, self._versions = pool, versions
        self._requests = {each.request_id: each for each in requests}
        self._step, self._log = step, log
        self._sent: dict[int, int] = {}
        """Number of additions to the buffer that each worker has."""
        self.replicas: dict[int, Replica] = {}
        """Newest replica of each worker that trained."""
        self._failed: set[int] = set()
        """Workers whose training has failed."""
        self._began_s = self._polled_s = pool.now()
        self.reports: list[SpotReport] = []
        versions.begin_rollout()
        versions.buffer.begin(step)

    # ---- texts

    def add(self, completions: Sequence[Completion]) -> None:
        """Add finished completions to the buffer."""
        self._versions.buffer.add(
            TextSnapshot.of(self._requests[each.request_id], each, self._step)
            for each in completions
        )

    def send_texts(self, worker: int) -> None:
        """Send a worker the texts that it does not have."""
        buffer = self._versions.buffer
        unsent = buffer.snapshots(self._sent.get(worker, 0))
        if unsent and self._pool.tell(worker, Worker.add_texts, unsent):
            self._sent[worker] = buffer.num_added

    # ---- training

    def rate(self, worker: int, forecast: Forecast) -> float:
        """Return what rollouts gain for each second until the last text is written.

        0 without texts that it does not have: it has trained on the others, or could not. Replicas
        are averaged, so those who train share the gain.
        """
        buffer, training = self._versions.buffer, set(self._pool.workers(State.SPOT))
        has_new = buffer.num_texts and buffer.num_added > self._sent.get(worker, 0)
        is_possible = has_new or worker in training
        if not is_possible or worker in self._failed or forecast.rest_s <= 0.0:
            return 0.0
        rollout_s = self._pool.now() - self._began_s + forecast.rest_s
        gain_s = self._versions.gain.gain_s(forecast.rest_s, rollout_s)
        return gain_s / len(training | {worker}) / forecast.rest_s - forecast.slowdown

    def start(self, worker: int, forecast: Forecast) -> None:
        """Start training on an idle worker."""
        self.send_texts(worker)
        self._pool.start(worker, Worker.train_drafter, self._versions.published)

    def end(self, worker: int) -> None:
        """Ask a worker that trains to stop."""
        self._pool.stop(worker)

    def on_ended(self, ended: TaskResult[SpotReport]) -> None:
        """Record the end of a worker's training."""
        if ended.is_lost:
            return
        if ended.error is not None:
            self._discard(ended.worker, 0, f"{type(ended.error).__name__}: {ended.error}")
            return
        report = ended.value()
        self.reports.append(report)
        if report.replica is not None:
            self._take(ended.worker, report.replica)
        if report.reason is SpotEnd.NOT_FINITE:
            self._discard(ended.worker, report.num_tokens, "it is not finite")

    def on_lost(self, worker: int) -> None:
        """Forget what a lost worker had; its replacement may train."""
        self._sent.pop(worker, None)
        self._failed.discard(worker)

    def poll(self, answering: Collection[int]) -> None:
        """Send new texts to workers that train, and offer their drafters to those that generate.

        Does nothing until `_POLL_S` after the last poll.
        """
        now = self._pool.now()
        idle = self._pool.workers(State.IDLE, State.LENDING, State.SPOT)
        if now - self._polled_s < _POLL_S or not idle:
            return
        self._polled_s = now
        generating, training = (
            [worker for worker in self._pool.workers(state) if worker in answering]
            for state in (State.GENERATING, State.SPOT)
        )
        ask_each = self._pool.ask_each
        for version in ask_each(Worker.drafter_version, dict.fromkeys(generating, ())).values():
            self._versions.record(version)
        for texts in ask_each(Worker.texts, dict.fromkeys(generating, (self._step,))).values():
            self._versions.buffer.add(texts)
        for worker in training:
            self.send_texts(worker)
        for worker, replica in ask_each(Worker.candidate, dict.fromkeys(training, ())).items():
            if replica is not None:
                self._take(worker, replica)
        self._offer(generating)

    def _take(self, worker: int, replica: Replica) -> None:
        self.replicas[worker] = replica
        self._versions.gain.record(worker, replica)

    def _discard(self, worker: int, num_tokens: int, reason: str) -> None:
        self._log(f"worker {worker}: its drafter is discarded: {reason}")
        self._versions.record_discarded(num_tokens, reason)
        self._failed.add(worker)

    def _offer(self, generating: Sequence[int]) -> None:
        offer = self._versions.offer(list(self.replicas.values()))
        if offer is None:
            return
        for worker in generating:
            self._pool.states.mark(worker, f"drafter v{offer.version} offered")
        self._pool.ask_each(Worker.offer, dict.fromkeys(generating, (offer,)))
