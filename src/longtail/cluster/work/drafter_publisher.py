"""Publication of the drafter: what a step has brought, and how it comes to the workers.

    sums of shards --------> solved by some workers together --.
    replicas of idle workers ---> compared, averaged ----------+--> version --> all workers adopt it

`drafter_versions` decides which drafter is offered, and counts the versions.
"""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from longtail.cluster.result import RolloutResult
from longtail.cluster.work.drafter_training import DrafterWork
from longtail.cluster.work.drafter_versions import DrafterState, DrafterVersions
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.weights import DrafterWeights
from longtail.speculation.drafter import Sums
from longtail.types import Request

_MOST_SOLVERS = 4
"""Workers that solve a drafter together: each is sent all sums, so that more gain little."""


@final
class DrafterPublisher:
    """Owns what the drafter learns from in a step, and offers what follows from it."""

    def __init__(
        self, pool: WorkerPool, versions: DrafterVersions, log: Callable[[str], None]
    ) -> None:
        self._pool, self.versions, self._log = pool, versions, log
        self._new_sums: list[Sums] = []
        """Sums over the completions of this step, if the drafter learns from sums."""
        self._training: DrafterWork | None = None
        """Buffer and replicas of the last rollout, until `offer`."""
        self._rollout_s = 0.0
        self._num_trained = 0
        """Tokens that the newest drafter has learned more than the one before."""

    def begin_rollout(
        self, step: int, requests: Sequence[Request], *, learns: bool
    ) -> DrafterWork | None:
        """Return the training during a rollout; None if no gradients train the drafter in it."""
        if self._training is not None:  # what the round before trained would be lost
            self.offer()
        if self.versions.sums is not None or not learns:
            return None
        return DrafterWork(self._pool, self.versions, requests, step=step, log=self._log)

    def end_rollout(self, result: RolloutResult, training: DrafterWork | None) -> None:
        """Keep what a rollout has brought until `offer`."""
        self._training, self._rollout_s = training, result.seconds
        found = [shard.value().sums for shard in result.shards]
        self._new_sums += [sums for sums in found if sums is not None]

    def train(self) -> None:
        """Train after a rollout if the only worker is never idle and rollouts gain by that."""
        if self._training is None or self._pool.size > 1:
            return
        limit_s = self.versions.gain.share_s(self._rollout_s)
        if limit_s:
            self._training.send_texts(0)
            task = {0: (self.versions.published, limit_s)}
            self._training.on_ended(self._pool.run(Worker.train_drafter, task)[0])

    def offer(self) -> None:
        """Offer the drafter learned since the last call to all workers, if it is better."""
        if (offer := self._new_drafter()) is not None:
            self._pool.states.mark(0, f"drafter v{offer.version} offered")
            self._pool.run_on_all(Worker.adopt, offer)
            self.versions.record(offer.version)

    def offer_missed(self, workers: Sequence[int]) -> None:
        """Offer the published drafter to those of the workers that draft with an older one."""
        new, ask_each = self.versions.published, self._pool.ask_each
        found = ask_each(Worker.drafter_version, dict.fromkeys(workers, ()))
        late = [each for each, old in found.items() if old is not None and old < new.version]
        ask_each(Worker.offer, dict.fromkeys(late, (new,)))

    def restore(self, state: DrafterState) -> None:
        """Serve a published drafter again. Raises CheckpointError if its tensors do not fit."""
        self._pool.run_on_all(Worker.adopt, self.versions.restore(state))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the drafter after a step."""
        return self.versions.metrics() | {"drafter/trained_tokens": float(self._num_trained)}

    def _new_drafter(self) -> DrafterWeights | None:
        """Return the drafter that was learned since the last call; None if it is no better."""
        versions, training = self.versions, self._training
        if versions.sums is not None:
            new, self._new_sums = self._new_sums, []
            self._num_trained = versions.add_sums(new)
            if not self._num_trained:
                return None
            tensors = self._solve(versions.sums)
            return versions.offer_solved(dict(sorted(tensors.items())), self._num_trained)
        if training is None:
            return None
        self._training = None
        self._num_trained = sum(report.num_tokens for report in training.reports)
        return versions.offer(list(training.replicas.values()), is_last=True)

    def _solve(self, sums: Sums) -> dict[str, Tensor]:
        """Return the drafter that follows from sums, solved by some workers together."""
        while True:
            self._pool.wait_ready()
            solvers = self._pool.present[:_MOST_SOLVERS]
            args = {each: (sums, part, len(solvers)) for part, each in enumerate(solvers)}
            parts = self._pool.run_each(Worker.solve_drafter, args)
            if len(parts) == len(solvers):  # else one is absent now
                return {name: part[name] for part in parts for name in part}
