"""Trains the group's drafter on idle workers, or solves it from sums; sends it to all workers.

    GENERATING --sequences--> buffer --> SPOT --replica--> versions --offer--> all workers
    (finished and unfinished)       (idle workers)  (after the rollout, if it is better)

    shards --sums over their completions--> solved by some workers after the step --> all workers

`drafter_versions` decides which drafter is offered. Nothing waits for its training, and no failure
of that ends a run: a replica that cannot be used is recorded, and its worker trains no more in this
rollout.
"""

from collections.abc import Callable, Collection, Sequence
from typing import final

from longtail.cluster.records import RolloutResult, TaskResult
from longtail.cluster.work.drafter_versions import DrafterState, DrafterVersions
from longtail.cluster.work.idle import IdleWork
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.training.buffer import SequenceSnapshot
from longtail.drafter.training.replica_gain import Replica, SpotEnd, SpotReport
from longtail.drafter.weights import DrafterWeights
from longtail.speculation.drafter import Sums
from longtail.types import Completion, Request

_POLL_S = 1.0
"""Seconds between two polls: each copies the tokens of all unfinished requests."""
_MOST_SOLVERS = 4
"""Workers that solve a drafter together: each is sent all sums, so that more gain little."""


@final
class DrafterPublisher(IdleWork):
    """Trains the drafter on the completions of each rollout, and offers what is better."""

    def __init__(
        self, pool: WorkerPool, versions: DrafterVersions, log: Callable[[str], None]
    ) -> None:
        self._pool, self.versions, self._log = pool, versions, log
        self._has_trained = False
        """Whether gradients may have trained the drafter since the last `offer`."""
        self._num_trained = 0
        """Tokens that the newest drafter has learned more than the one before."""
        self._new_sums: list[Sums] = []
        """Sums over the completions of this step, if the drafter learns from sums."""
        self._rollout_s, self._has_failed = 0.0, False
        self.begin_rollout(0, (), learns=False)

    def begin_rollout(self, step: int, requests: Sequence[Request], *, learns: bool) -> None:
        """Begin a rollout; `learns`: the drafter may learn from its completions."""
        if self._has_trained:  # what the round before trained would be lost
            self.offer()
        self._step, self._requests = step, {each.request_id: each for each in requests}
        self._sent: dict[int, int] = {}
        """Number of additions to the buffer that each worker has."""
        self._replicas: dict[int, Replica] = {}
        """Newest replica of each worker that trained."""
        self._failed: set[int] = set()
        """Workers whose training has failed."""
        self._polled_s = self._pool.now()
        self.reports: list[SpotReport] = []
        """Trainings that have ended in this rollout."""
        self._has_trained = learns and self.versions.sums is None
        if self._has_trained:
            self.versions.gain.begin_rollout()
            self.versions.buffer.begin(step)

    def end_rollout(self, result: RolloutResult) -> None:
        """Keep the sums of a rollout until `offer`."""
        self._rollout_s = result.seconds
        found = [shard.value().sums for shard in result.shards]
        self._new_sums += [sums for sums in found if sums is not None]

    def train(self) -> None:
        """Train after a rollout if the only worker is never idle and rollouts gain by that."""
        if not self._has_trained or self._pool.size > 1:
            return
        limit_s = self.versions.gain.share_s(self._rollout_s)
        if limit_s:
            self._send_new(0)
            task = {0: (self.versions.published, limit_s)}
            self.on_ended(self._pool.run(Worker.train_drafter, task)[0])

    # ---- training as idle work

    def has_work(self, worker: int) -> bool:
        """Return whether a worker trains, or lacks what is new in the buffer.

        One that has all of the buffer has trained on that, or could not.
        """
        if not self._has_trained or worker in self._failed:
            return False
        buffer = self.versions.buffer
        has_new = buffer.num_sequences and buffer.num_added > self._sent.get(worker, 0)
        return bool(has_new) or worker in self._pool.workers(State.SPOT)

    def start(self, worker: int) -> None:
        """Start training on an idle worker."""
        self._send_new(worker)
        self._pool.start(worker, Worker.train_drafter, self.versions.published)

    def end(self, worker: int) -> None:
        """Ask a worker that trains to stop."""
        self._pool.stop(worker)

    def add(self, completions: Sequence[Completion]) -> None:
        """Add finished completions to the buffer."""
        if self._has_trained:
            self.versions.buffer.add(
                SequenceSnapshot.of(self._requests[each.request_id], each, self._step)
                for each in completions
            )

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
            self._replicas[ended.worker] = report.replica
            self.versions.gain.record(ended.worker, report.replica)
        if report.reason is SpotEnd.NOT_FINITE:
            self._discard(ended.worker, report.num_tokens, "it is not finite")

    def on_lost(self, worker: int) -> None:
        """Forget what a lost worker had; its replacement may train."""
        self._sent.pop(worker, None)
        self._failed.discard(worker)

    def poll(self, answering: Collection[int]) -> None:
        """Send workers that train what is new, the unfinished sequences included.

        Does nothing until `_POLL_S` after the last poll.
        """
        now, workers = self._pool.now(), self._pool.workers
        is_due = self._has_trained and now - self._polled_s >= _POLL_S
        if not is_due or not workers(State.IDLE, State.SPOT):
            return
        self._polled_s = now
        generating, training = (
            [worker for worker in workers(state) if worker in answering]
            for state in (State.GENERATING, State.SPOT)
        )
        asked = dict.fromkeys(generating, (self._step,))
        for sequences in self._pool.ask_each(Worker.sequences, asked).values():
            self.versions.buffer.add(sequences)
        for worker in training:
            self._send_new(worker)

    def _send_new(self, worker: int) -> None:
        """Send a worker what the buffer has and it has not."""
        buffer = self.versions.buffer
        unsent = buffer.snapshots(self._sent.get(worker, 0))
        if unsent and self._pool.tell(worker, Worker.add_sequences, unsent):
            self._sent[worker] = buffer.num_added

    def _discard(self, worker: int, num_tokens: int, reason: str) -> None:
        self._log(f"worker {worker}: its drafter is discarded: {reason}")
        self.versions.record_discarded(num_tokens, reason)
        self._failed.add(worker)

    # ---- publication

    def offer(self) -> None:
        """Offer the drafter learned since the last call to all workers, if it is better."""
        if (offer := self._new_drafter()) is not None:
            self._pool.states.mark(0, f"drafter v{offer.version} offered")
            self._adopt(offer)
            self.versions.publish(offer)

    def _adopt(self, drafter: DrafterWeights) -> None:
        """Serve a drafter on all workers, and on those that start later."""
        self._pool.drafter = drafter
        self._pool.run_on_all(Worker.adopt, drafter)

    def _new_drafter(self) -> DrafterWeights | None:
        """Return the drafter that was learned since the last call; None if it is no better."""
        if self.versions.sums is not None:
            new, self._new_sums = self._new_sums, []
            self._num_trained = self.versions.add_sums(new)
            return self._solved() if self._num_trained else None
        if not self._has_trained:
            return None
        self._has_trained = False
        self._num_trained = sum(report.num_tokens for report in self.reports)
        return self.versions.offer(list(self._replicas.values()))

    def _solved(self) -> DrafterWeights | None:
        """Return the drafter that follows from the sums, solved by some workers together.

        None, with one line in a run, if none follows: no text depends on its weights.
        """
        while True:
            self._pool.wait_ready()
            solvers = self._pool.present[:_MOST_SOLVERS]
            args = {
                each: (self.versions.sums, part, len(solvers)) for part, each in enumerate(solvers)
            }
            parts = self._pool.run_each(Worker.solve_drafter, args)
            if failed := [part for part in parts if isinstance(part, str)]:
                if not self._has_failed:
                    self._log(f"the drafter keeps its weights: {failed[0]}")
                self._has_failed = True
                return None
            if len(parts) == len(solvers):  # else one is absent now
                tensors = {n: part[n] for part in parts if not isinstance(part, str) for n in part}
                return self.versions.offer_solved(dict(sorted(tensors.items())), self._num_trained)

    def restore(self, state: DrafterState) -> None:
        """Serve a published drafter again. Raises CheckpointError if its tensors do not fit."""
        self._adopt(self.versions.restore(state))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the drafter after a step."""
        return self.versions.metrics() | {"drafter/trained_tokens": float(self._num_trained)}
