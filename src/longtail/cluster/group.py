"""All workers as one: the training loop generates, learns and publishes through a `WorkerGroup`.

    rollout(step, requests), train_drafter(), learn(batches), publish(), offer_drafter()

    loop --Request, TrainBatch---------> group --tasks, messages--> pool --> worker --> generator
         <--RolloutResult, LearnerReport--    <-------TaskResult---             (engine) or learner

The loss of a worker costs time, but no completion, gradient or update: its task is done again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from longtail.cluster.records import GroupSettings, Progress, RolloutResult
from longtail.cluster.rollout import Rollout
from longtail.cluster.schedule.placement import Lengths
from longtail.cluster.work.drafter_publisher import DrafterPublisher
from longtail.cluster.work.drafter_versions import Decision, DrafterState, DrafterVersions
from longtail.cluster.work.idle import IdleCoordinator
from longtail.cluster.work.learning import LearningWork
from longtail.cluster.workers.learner_team import LearnerTeam
from longtail.cluster.workers.processes import Processes
from longtail.cluster.workers.states import State, Timeline
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.errors import CheckpointError
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.rl.streaming import GroupStream
from longtail.types import Request, TrainBatch


@final
class WorkerGroup:
    """All workers. Lifecycle: `begin`, `restore` if the run resumes, `publish`, then steps."""

    def __init__(
        self,
        processes: Processes,
        settings: GroupSettings,
        *,
        on_progress: Callable[[Progress], None],
        log: Callable[[str], None],
    ) -> None:
        self._settings, self._on_progress, self._log = settings, on_progress, log
        self._pool = WorkerPool(processes, settings, log, self._on_replaced)
        self._team = LearnerTeam(self._pool, settings, log)
        self._lengths = Lengths()
        self._learning = LearningWork(self._pool, log, learns_ahead=settings.learns_ahead)
        self.num_parameters = 0
        """Number of parameters of the policy; set by `begin`."""
        self.drafter: DrafterPublisher | None = None
        """Publishes the drafter that learns; None without one. Set by `begin`."""

    def begin(self) -> None:
        """Wait for all workers."""
        self._pool.run_on_all(Worker.ready)
        (self.num_parameters,) = self._pool.run_on((0,), Worker.num_parameters)
        (drafter,) = self._pool.run_on((0,), Worker.drafter)
        if drafter is not None:
            weights, sums = drafter
            buffer = DrafterBuffer(self._settings.buffer_bytes, seed=self._settings.seed)
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
        works = (self._learning, self.drafter)
        result = Rollout(
            pool=self._pool,
            lengths=self._lengths,
            idle=IdleCoordinator(self._pool, [work for work in works if work is not None]),
            drafter=self.drafter,
            on_progress=self._on_progress,
            learns=trains,
            requests=requests,
        ).run()
        if self.drafter is not None:
            self.drafter.end_rollout(result)
        return result

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

    def drain_traffic(self) -> dict[str, float]:
        """Return metrics of what passed between hosts since the last call; none on one host."""
        return self._pool.processes.drain_traffic()

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
        """Restore every learner from a checkpoint.

        Worker 0 reads it, and the others get a copy: their hosts may not have the files. Shards are
        cut from it when the team is formed.
        """
        self._pool.run_on((0,), Worker.restore_saved, policy, learner)
        others = self._pool.present[1:]
        if others:
            (copied,) = self._pool.run_on((0,), Worker.policy_state)
            self._pool.run_on(others, Worker.restore, copied)

    def save_drafter(self, path: Path) -> None:
        """Write the configured drafter, or one that worker 0's generator learns by itself."""
        self._pool.run_on((0,), Worker.save_drafter, path)

    def drafter_state(self) -> DrafterState | None:
        """Copy the published drafter, its buffer, and the lengths of prompts; None without one."""
        lengths = self._lengths.state()
        return None if self.drafter is None else self.drafter.versions.state(lengths=lengths)

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve a published drafter again. Raises CheckpointError if its tensors do not fit."""
        assert self.drafter is not None, "there is a drafter to restore"
        try:
            self._lengths.restore(state.numbers["lengths"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"lengths of prompts are malformed ({error})") from error
        self.drafter.restore(state)

    def _on_replaced(self, worker: int) -> None:
        self._team.is_stale = True
