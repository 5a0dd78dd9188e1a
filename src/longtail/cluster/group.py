"""All workers as one: the training loop generates, learns and publishes through a `WorkerGroup`.

    rollout(step, requests) -> RolloutResult   shards, spot training, offers
    train_drafter()                            by one worker, if spot.train is "serial"
    learn(batches) -> LearnerReport            one update by all learners together
    publish()                                  learner -> engine on every worker
    offer_drafter()                            the newly trained drafter -> every worker

The loss of a worker costs time, but no text, gradient or update: its task is done again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.cluster import tasks
from longtail.cluster.drafter.publisher import Decision, Publisher
from longtail.cluster.placement import LengthHistory
from longtail.cluster.pool import WorkerPool
from longtail.cluster.records import Progress
from longtail.cluster.rollout import RolloutCoordinator, RolloutResult
from longtail.cluster.spot import SpotCoordinator
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.team import LearnerTeam
from longtail.cluster.timeline import Mark, Timeline
from longtail.config.rl import RunConfig
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.weights import DrafterWeights, with_prefix, without_prefix
from longtail.errors import CheckpointError
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.speculation.drafter import Sums
from longtail.types import Request, TrainBatch

SHARE = 0.1
"""Seconds of serial training after a rollout, as a share of the rollout's."""
FADE = 0.8
"""Weight of a text in the sums relative to one of the next step: its policy is older."""
_MOST_SOLVERS = 4
"""Workers that solve a drafter together: each is sent all sums, so that more gain little."""
_DRAFTER, _BUFFER, _SUMS = "drafter/", "buffer/", "sums/"


def with_new(sums: Sums, new: Iterable[Sums]) -> tuple[Sums, int]:
    """Return sums with those of a step's texts, and the number of these texts' tokens."""
    known = sums.faded(FADE)
    before = known.num_tokens
    for each in new:
        known.add(each)
    return known, round(known.num_tokens - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """The published drafter in the middle of a run, with its texts and the lengths of prompts."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def drafter(self) -> dict[str, Tensor]:
        """Return the drafter's own parameters."""
        return without_prefix(_DRAFTER, self.tensors)

    def sums(self) -> dict[str, Tensor]:
        """Return the sums that the drafter follows from; empty without any."""
        return without_prefix(_SUMS, self.tensors)


@final
class WorkerGroup:
    """Owns the pool. Lifecycle: `begin`, `restore` if the run resumes, `publish`, then steps."""

    def __init__(
        self,
        pool: WorkerPool,
        config: RunConfig,
        *,
        on_progress: Callable[[Progress], None],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool, self._config = pool, config
        self._on_progress, self._log = on_progress, log
        self._supervisor = WorkerSupervisor(
            pool,
            config.cluster.worker_timeout_s,
            is_sharded=config.is_sharded,
            log=log,
            on_replaced=self._on_replaced,
            clock=clock,
        )
        self._team = LearnerTeam(
            pool, self._supervisor, config.cluster.worker_timeout_s, is_sharded=config.is_sharded
        )
        self.num_parameters = 0
        """Number of parameters of the policy; set by `begin`."""
        self._buffer = DrafterBuffer(config.spot.buffer_mb * 2**20, seed=config.run.seed)
        self.lengths = LengthHistory()
        """Lengths in earlier epochs, by which rollouts are placed."""
        self._publisher: Publisher | None = None
        self._sums: Sums | None = None
        """Sums over the texts of all steps; None if no drafter learns from sums."""
        self._new_sums: list[Sums] = []
        """Sums over the texts of this step, not yet among those."""
        self._spot: SpotCoordinator | None = None
        """Texts and replicas of the last rollout, until `offer_drafter`."""
        self._train_s = 0.0
        """Seconds of serial training after the last rollout."""
        self._num_trained = 0
        """Tokens that the newest drafter has learned more than the one before."""
        self._marks: list[Mark] = []

    def begin(self) -> None:
        """Wait for all workers."""
        self._supervisor.run_on_all(tasks.READY)
        (self.num_parameters,) = self._supervisor.run_on((0,), tasks.NUM_PARAMETERS)
        (drafter,) = self._supervisor.run_on((0,), tasks.DRAFTER)
        if drafter is not None:
            weights, self._sums = drafter
            self._publisher = Publisher(weights, self._buffer)

    def rollout(
        self, step: int, requests: Sequence[Request], *, trains: bool = True
    ) -> RolloutResult:
        """Generate all completions; `trains`: the drafter may learn these texts."""
        if self._spot is not None:  # a refill: what the round before trained would be lost
            self.offer_drafter()
        spot = self._begin_spot(step) if trains else None
        coordinator = RolloutCoordinator(
            self._supervisor, self._publisher, spot, self._on_progress, learns=trains
        )
        result = coordinator.run(requests, self._expected(requests))
        for request, completion in zip(requests, result.completions, strict=True):
            self.lengths.record(_prompt_id(request), len(completion.tokens))
        if spot is not None:
            self._spot, self._train_s = spot, SHARE * result.seconds
            self._marks += spot.marks
        found = [shard.value().sums for shard in result.shards]
        self._new_sums += [sums for sums in found if sums is not None]
        return result

    def train_drafter(self) -> None:
        """Train the drafter on the texts of the last rollout, while all wait, if it is serial.

        Called before `learn`, so that features of the rollout are reused.
        """
        if self._publisher is None or self._spot is None or self._config.spot.train != "serial":
            return
        self._supervisor.wait_ready()
        self._spot.send_texts(0)
        task = {0: (self._publisher.published, self._train_s)}
        ended = self._supervisor.run(tasks.TRAIN_DRAFTER, task)[0]
        if not ended.is_lost:
            self._spot.on_trained(ended)

    def abandon(self) -> None:
        """Stop the tasks of an interrupted rollout, and drop their results."""
        self._supervisor.abandon()

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step on all workers together; again, if a worker is lost in it."""
        return self._team.learn(batches)

    def publish(self) -> None:
        """Hand the learners' weights to the engines."""
        self._supervisor.run_on_all(tasks.PUBLISH)

    def offer_drafter(self) -> None:
        """Offer the drafter trained since the last call to all workers, if it is better."""
        publisher, offer = self._publisher, self._new_drafter()
        if publisher is None or offer is None:
            return
        mark = f"drafter v{offer.version} offered"
        self._marks.append(Mark(worker=0, at_s=self._supervisor.now(), name=mark))
        publisher.record(self._supervisor.run_on_all(tasks.ADOPT, offer))
        self._mark_offered(publisher, offer.version)

    def _new_drafter(self) -> DrafterWeights | None:
        """Return the drafter that was learned since the last call; None if it is no better."""
        publisher, spot = self._publisher, self._spot
        if publisher is None:
            return None
        if self._sums is not None:
            known, self._num_trained = with_new(self._sums, self._new_sums)
            self._new_sums = []
            if not self._num_trained:
                return None
            self._sums = known
            num = min(self._pool.size, _MOST_SOLVERS)
            args = {worker: (known, worker, num) for worker in range(num)}
            parts = self._supervisor.run_each(tasks.SOLVE_DRAFTER, args)
            tensors = {name: part[name] for part in parts for name in part}
            return publisher.offer_solved(dict(sorted(tensors.items())), self._num_trained)
        if spot is None:
            return None
        publisher.withdraw()
        self._spot = None
        self._num_trained = sum(report.num_tokens for report in spot.reports)
        return publisher.offer(spot.replicas, renews=True)

    # ---- observation

    @property
    def published(self) -> DrafterWeights | None:
        """The drafter that is served; None without one that can be trained."""
        return None if self._publisher is None else self._publisher.published

    def drafter_metrics(self) -> dict[str, float]:
        """Return the metrics of the trained drafter after a step; empty without one."""
        if self._publisher is None:
            return {}
        known = {
            "drafter/version": float(self._publisher.published.version),
            "drafter/trained_tokens": float(self._num_trained),
        }
        if self._publisher.accept_len is not None:
            known["drafter/expected_accept_length"] = self._publisher.accept_len
        return known

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in ascending order."""
        return self._supervisor.workers(*states)

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions about the drafter since the last call."""
        return [] if self._publisher is None else self._publisher.drain_decisions()

    def drain_timeline(self) -> Timeline:
        """Return the timeline of all workers since the last call."""
        marks, self._marks = self._marks, []
        begin_s, end_s, spans = self._supervisor.drain_states()
        return Timeline(spans=spans, marks=tuple(marks), begin_s=begin_s, end_s=end_s)

    def drain_traffic(self) -> dict[str, float]:
        """Return metrics of what passed between hosts since the last call; none on one host."""
        return self._pool.drain_traffic()

    # ---- state

    def save_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._supervisor.run_on((0,), tasks.SAVE_POLICY, path)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the policy's weights."""
        return self._supervisor.run_on((0,), tasks.POLICY_DIGEST)[0]

    def learner_state(self) -> LearnerState:
        """Copy the state of the learner beside the weights; of shards, all rows."""
        return self._team.state()

    def restore(self, policy: Path, learner: LearnerState) -> None:
        """Restore every learner from a checkpoint.

        Worker 0 reads it, and the others get a copy: their hosts may not have the files. With
        sharding every worker reads its rows.
        """
        if self._config.is_sharded:
            self._supervisor.run_on_all(tasks.RESTORE_SAVED, policy, learner)
            return
        self._supervisor.run_on((0,), tasks.RESTORE_SAVED, policy, learner)
        others = range(1, self._pool.size)
        if others:
            (copied,) = self._supervisor.run_on((0,), tasks.POLICY_STATE)
            self._supervisor.run_on(others, tasks.RESTORE, copied)

    def save_drafter(self, path: Path) -> None:
        """Write the configured drafter as a drafter directory."""
        self._supervisor.run_on((0,), tasks.SAVE_DRAFTER, path)

    def drafter_state(self) -> DrafterState | None:
        """Copy the published drafter, its texts, and the lengths of prompts; None without one."""
        if self._publisher is None:
            return None
        weights, texts = self._publisher.published, self._buffer.tensors()
        sums = {} if self._sums is None else self._sums.tensors()
        return DrafterState(
            tensors=with_prefix(_DRAFTER, weights.tensors)
            | with_prefix(_BUFFER, texts)
            | with_prefix(_SUMS, sums),
            numbers={
                "version": weights.version,
                "num_tokens": weights.num_tokens,
                "accept_len": self._publisher.accept_len,
                "buffer": self._buffer.state(),
                "lengths": self.lengths.state(),
            },
        )

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve a published drafter again, with its texts.

        Raises CheckpointError if its tensors have other shapes.
        """
        assert self._publisher is not None, "there is a drafter to restore"
        tensors = state.drafter()
        if not self._publisher.published.is_shaped_as(tensors):
            raise CheckpointError("the drafter of the checkpoint is of another shape")
        if self._sums is not None:
            self._sums = self._sums.restored(state.sums())
        self._buffer.restore(without_prefix(_BUFFER, state.tensors), state.numbers["buffer"])
        self.lengths.restore(state.numbers["lengths"])
        weights = DrafterWeights(
            version=state.numbers["version"],
            tensors=tensors,
            num_tokens=state.numbers.get("num_tokens", 0),
        )
        self._publisher.restore(weights, state.numbers.get("accept_len"))
        self._supervisor.run_on_all(tasks.ADOPT, weights)
        self._mark_offered(self._publisher, weights.version)

    def park(self, path: Path) -> None:
        """Free most memory of all workers until `unpark`; `path` takes the learner's state."""
        assert not self._config.is_sharded, "shards are not parked"
        args = {worker: (path, worker == 0) for worker in range(self._pool.size)}
        for ended in self._supervisor.run(tasks.PARK, args).values():
            ended.value()

    def unpark(self, path: Path) -> None:
        """Continue as if `park` had not been called."""
        self._supervisor.run_on_all(tasks.UNPARK, path)

    def close(self) -> None:
        """End all workers."""
        self._pool.close()

    # ---- helpers

    def _on_replaced(self, worker: int) -> None:
        self._team.mark_stale()
        if self._publisher is not None:
            self._publisher.forget(worker)

    def _begin_spot(self, step: int) -> SpotCoordinator | None:
        """Begin to collect texts, if there is a drafter that gradients train."""
        if self._publisher is None or self._sums is not None:
            return None
        return SpotCoordinator(
            self._supervisor,
            self._publisher,
            self._buffer,
            step=step,
            trains_idle=self._config.spot.train == "spot",
            log=self._log,
        )

    def _expected(self, requests: Sequence[Request]) -> dict[str, float]:
        """Return the length of each group in earlier epochs, if it is known."""
        expected = {each.group_id: self.lengths.expected(_prompt_id(each)) for each in requests}
        return {group: length for group, length in expected.items() if length is not None}

    def _mark_offered(self, publisher: Publisher, version: int) -> None:
        for worker in range(self._pool.size):
            publisher.mark_offered(worker, version)


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id
