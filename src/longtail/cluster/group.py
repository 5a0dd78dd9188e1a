"""All workers as one: the training loop generates, learns and publishes through a `WorkerGroup`.

    rollout(step, requests), train_drafter(), learn(batches), publish(), offer_drafter()

    loop --Request, TrainBatch---------> group --tasks, messages--> pool --> worker --> generator
         <--RolloutResult, LearnerReport--    <-------TaskResult---             (engine) or learner

The loss of a worker costs time, but no completion, gradient or update: its task is done again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from longtail.cluster.records import Progress, RolloutResult
from longtail.cluster.rollout import Rollout
from longtail.cluster.schedule.placement import Lengths
from longtail.cluster.work.drafter_publisher import DrafterPublisher
from longtail.cluster.work.drafter_versions import Decision, DrafterState, DrafterVersions
from longtail.cluster.work.idle import IdleWork
from longtail.cluster.work.learning_ahead import LearningWork
from longtail.cluster.workers.learner_team import LearnerTeam
from longtail.cluster.workers.processes import Processes
from longtail.cluster.workers.states import State, Timeline
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.config.rl import RunConfig
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.rl.group_stream import GroupStream, streams
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.types import Request, TrainBatch


@final
class WorkerGroup:
    """All workers. Lifecycle: `begin`, `restore` if the run resumes, `publish`, then steps."""

    def __init__(
        self,
        processes: Processes,
        config: RunConfig,
        *,
        on_progress: Callable[[Progress], None],
        log: Callable[[str], None],
    ) -> None:
        self._config, self._on_progress, self._log = config, on_progress, log
        self._pool = WorkerPool(processes, config, log, self._on_replaced)
        self._team = LearnerTeam(self._pool, config, log)
        self._lengths = Lengths()
        self._learning = LearningWork(self._pool, log, learns_ahead=streams(config.learner))
        self.drafter: DrafterPublisher | None = None
        """Publishes the drafter that learns; None without one. Set by `begin`."""

    def begin(self) -> None:
        """Wait for all workers."""
        self._pool.run_on_all(Worker.ready)
        (drafter,) = self._pool.run_on((0,), Worker.drafter)
        if drafter is not None:
            weights, sums = drafter
            size, seed = self._config.spot.buffer_mb * 2**20, self._config.run.seed
            buffer = DrafterBuffer(size, seed=seed)
            versions = DrafterVersions(weights, buffer, sums)
            self.drafter = DrafterPublisher(self._pool, versions, self._log)

    def rollout(
        self,
        step: int,
        requests: Sequence[Request],
        groups: GroupStream | None = None,
        *,
        trains: bool = True,
    ) -> RolloutResult:
        """Generate all completions; `trains`: the drafter may learn from them.

        `groups` gets each completion when it is finished; idle workers learn from the groups that
        it returns.
        """
        self._learning.finish()  # a refill: workers are idle before the next round
        self._learning.begin(groups, requests)
        if self.drafter is not None:
            self.drafter.begin_rollout(step, requests, learns=trains)
        works: list[IdleWork] = [self._learning]
        result = Rollout(
            pool=self._pool,
            lengths=self._lengths,
            works=works if self.drafter is None else [*works, self.drafter],
            on_progress=self._on_progress,
            learns=trains,
            requests=requests,
        ).run()
        if self.drafter is None:
            return result
        self.drafter.end_rollout(result)
        return replace(result, spots=tuple(self.drafter.reports))

    def train_drafter(self) -> None:
        """Train the drafter after a rollout if the only worker is never idle and it gains by that.

        Called before `learn`, so that features of the rollout are reused.
        """
        if self.drafter is not None:
            self.drafter.train()

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step on all workers together; again, if a worker is lost in it."""
        self._learning.finish()
        return self._team.learn(batches)

    def publish(self) -> None:
        """Hand the learners' weights to the engines: all have the newest ones then."""
        self._team.form()
        self._pool.run_on_all(Worker.publish)

    def offer_drafter(self) -> None:
        """Offer the drafter trained since the last call to all workers, if it is better."""
        if self.drafter is not None:
            self.drafter.offer()

    def abandon(self) -> None:
        """Stop the tasks of an interrupted rollout, and drop their results."""
        self._pool.abandon()

    def close(self) -> None:
        """End all workers."""
        self._pool.processes.close()

    # ---- observation

    def workers(self, *states: State) -> list[int]:
        """Return the workers that are in one of these states, in ascending order."""
        return self._pool.workers(*states)

    def drafter_metrics(self) -> dict[str, float]:
        """Return the metrics of the trained drafter after a step; empty without one."""
        return {} if self.drafter is None else self.drafter.metrics()

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions about the drafter since the last call."""
        return [] if self.drafter is None else self.drafter.versions.drain_decisions()

    def drain_timeline(self) -> Timeline:
        """Return the timeline of all workers since the last call."""
        return self._pool.states.drain()

    # ---- state

    def learner_state(self) -> LearnerState:
        """Copy the learner's state, without the weights; of a sharded learner, all rows."""
        return self._team.state()

    def save_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._pool.run_on((0,), Worker.save_policy, path)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the policy's weights."""
        return self._pool.run_on((0,), Worker.policy_digest)[0]

    def restore(self, policy: Path, learner: LearnerState) -> None:
        """Restore the learners from a checkpoint.

        Worker 0 reads it, as the hosts of others may not have the files: they get it in the team,
        where shards are cut from it.
        """
        self._pool.run_on((0,), Worker.restore_saved, policy, learner)
        self._team.form(learner.numbers["version"])

    def save_drafter(self, path: Path) -> None:
        """Write the configured drafter, or one that worker 0's generator learns by itself."""
        self._pool.run_on((0,), Worker.save_drafter, path)

    def drafter_state(self) -> DrafterState | None:
        """Copy the published drafter and what it learns from; None without one."""
        return None if self.drafter is None else self.drafter.versions.state()

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve a published drafter again. Raises CheckpointError if its tensors do not fit."""
        assert self.drafter is not None, "there is a drafter to restore"
        self.drafter.restore(state)

    def _on_replaced(self, worker: int) -> None:
        self._team.is_stale = True
