"""All workers as one: the training loop generates, learns and publishes through a `WorkerGroup`.

    rollout(step, requests), train_drafter(), learn(batches), publish(), offer_drafter()

The loss of a worker costs time, but no text, gradient or update: its task is done again.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

from torch import Tensor

from longtail.cluster.coordinator import POLL_S, RolloutCoordinator
from longtail.cluster.records import GroupSettings, Progress
from longtail.cluster.result import RolloutResult
from longtail.cluster.schedule.forecast import RolloutForecast
from longtail.cluster.schedule.placement import LengthHistory
from longtail.cluster.timeline import Mark, Timeline
from longtail.cluster.work.drafter_publisher import Decision, DrafterState, Publisher
from longtail.cluster.work.drafter_training import DrafterWork
from longtail.cluster.work.idle import IdleCoordinator, LendingWork
from longtail.cluster.work.learning import LearningWork
from longtail.cluster.workers.learner_team import LearnerTeam
from longtail.cluster.workers.processes import Processes
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.weights import DrafterWeights
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.rl.streaming import GroupStream
from longtail.speculation.drafter import Sums
from longtail.types import Request, TrainBatch

_MOST_SOLVERS = 4
"""Workers that solve a drafter together: each is sent all sums, so that more gain little."""


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
        self._settings = settings
        self._on_progress, self._log = on_progress, log
        self._pool = WorkerPool(processes, settings, log, self._on_replaced)
        self._team = LearnerTeam(self._pool, settings, log)
        self._shares = self._pool.size > 1 and settings.shares
        """Whether running requests move, and cores are lent."""
        self.num_parameters = 0
        """Number of parameters of the policy; set by `begin`."""
        self.lengths = LengthHistory()
        """Lengths in earlier epochs, by which rollouts are placed."""
        self._forecast = RolloutForecast(settings.max_running)
        self._learn_token_s = 0.0
        """Seconds of learning from a token; 0 as long as they are unknown."""
        self._learning: tuple[IdleCoordinator, LearningWork] | None = None
        """Learning from the groups of the last rollout, until `learn`."""
        self._publisher: Publisher | None = None
        self._new_sums: list[Sums] = []
        """Sums over the texts of this step, if the drafter learns from sums."""
        self._spot: DrafterWork | None = None
        """Texts and replicas of the last rollout, until `offer_drafter`."""
        self._rollout_s = 0.0
        self._num_trained = 0
        """Tokens that the newest drafter has learned more than the one before."""
        self._marks: list[Mark] = []
        self._borrows = False
        """Whether engines can compute on the cores of other workers; set by `begin`."""

    def begin(self) -> None:
        """Wait for all workers."""
        self._borrows = all(self._pool.run_on_all(Worker.ready))
        (self.num_parameters,) = self._pool.run_on((0,), Worker.num_parameters)
        (drafter,) = self._pool.run_on((0,), Worker.drafter)
        if drafter is not None:
            weights, sums = drafter
            buffer = DrafterBuffer(self._settings.buffer_bytes, seed=self._settings.seed)
            self._publisher = Publisher(weights, buffer, sums)

    def rollout(
        self,
        step: int,
        requests: Sequence[Request],
        groups: GroupStream | None = None,
        *,
        trains: bool = True,
    ) -> RolloutResult:
        """Generate all completions; `trains`: the drafter may learn these texts.

        `groups` gets each text when it is finished; idle workers learn from the groups that it
        returns.
        """
        self._learn_rest()  # a refill: workers are idle before the next round
        if self._spot is not None:  # what the round before trained would be lost
            self.offer_drafter()
        spot = self._begin_spot(step, requests) if trains else None
        learning = self._begin_learning(groups, requests)
        lending = LendingWork(self._pool, self._forecast.lends)
        works = [work for work in (learning, spot, lending) if work is not None]
        idle = IdleCoordinator(self._pool, works)
        coordinator = RolloutCoordinator(
            pool=self._pool,
            forecast=self._forecast,
            idle=idle,
            hosts=self._hosts,
            publisher=self._publisher,
            spot=spot,
            learning=learning,
            on_texts=None if groups is None else groups.add,
            on_progress=self._on_progress,
            shares=self._shares,
            learns=trains,
            requests=requests,
            expected=self._expected(requests),
        )
        result = coordinator.run()
        self._learning = None if learning is None else (idle, learning)
        self._marks += coordinator.marks
        for request, completion in zip(requests, result.completions, strict=True):
            self.lengths.record(_prompt_id(request), len(completion.tokens))
        if spot is not None:
            self._spot, self._rollout_s = spot, result.seconds
            self._marks += spot.marks
        found = [shard.value().sums for shard in result.shards]
        self._new_sums += [sums for sums in found if sums is not None]
        return result

    def train_drafter(self) -> None:
        """Train the drafter after a rollout if the only worker is never idle and it gains by that.

        Called before `learn`, so that features of the rollout are reused.
        """
        if self._publisher is None or self._spot is None or self._pool.size > 1:
            return
        limit_s = self._publisher.gain.share_s(self._rollout_s)
        if limit_s:
            self._spot.send_texts(0)
            task = {0: (self._publisher.published, limit_s)}
            self._spot.on_ended(self._pool.run(Worker.train_drafter, task)[0])

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step on all workers together; again, if a worker is lost in it."""
        self._learn_rest()
        return self._team.learn(batches)

    def _learn_rest(self) -> None:
        """Learn from the micro-batches of the last rollout that are left, one at a time."""
        if self._learning is None:
            return
        (idle, learning), self._learning = self._learning, None
        forecast = self._forecast.now(self._pool.now(), is_over=True)
        learning.poll(())
        while learning.is_unfinished:
            idle.assign(forecast)
            for ended in self._pool.watch(POLL_S):
                idle.on_ended(ended)
        self._learn_token_s = learning.token_s

    def publish(self) -> None:
        """Hand the learners' weights to the engines: all have the newest ones then."""
        self._team.form()
        self._pool.run_on_all(Worker.publish)

    def offer_drafter(self) -> None:
        """Offer the drafter trained since the last call to all workers, if it is better."""
        publisher, offer = self._publisher, self._new_drafter()
        if publisher is None or offer is None:
            return
        mark = f"drafter v{offer.version} offered"
        self._marks.append(Mark(worker=0, at_s=self._pool.now(), name=mark))
        self._pool.run_on_all(Worker.adopt, offer)
        publisher.record(offer.version)

    def _new_drafter(self) -> DrafterWeights | None:
        """Return the drafter that was learned since the last call; None if it is no better."""
        publisher, spot = self._publisher, self._spot
        if publisher is None:
            return None
        if publisher.sums is not None:
            self._num_trained = publisher.add_sums(self._new_sums)
            self._new_sums = []
            if not self._num_trained:
                return None
            tensors = self._solve(publisher.sums)
            return publisher.offer_solved(dict(sorted(tensors.items())), self._num_trained)
        if spot is None:
            return None
        self._spot = None
        self._num_trained = sum(report.num_tokens for report in spot.reports)
        return publisher.offer(list(spot.replicas.values()), is_last=True)

    def _solve(self, sums: Sums) -> dict[str, Tensor]:
        """Return the drafter that follows from sums, solved by some workers together."""
        while True:
            self._pool.wait_ready()
            solvers = self._pool.present[:_MOST_SOLVERS]
            args = {each: (sums, part, len(solvers)) for part, each in enumerate(solvers)}
            parts = self._pool.run_each(Worker.solve_drafter, args)
            if len(parts) == len(solvers):  # else one is absent now
                return {name: part[name] for part in parts for name in part}

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

    @property
    def published(self) -> DrafterWeights | None:
        """The drafter that is served; None without one that can be trained."""
        return None if self._publisher is None else self._publisher.published

    def drafter_metrics(self) -> dict[str, float]:
        """Return the metrics of the trained drafter after a step; empty without one."""
        if self._publisher is None:
            return {}
        return self._publisher.metrics() | {"drafter/trained_tokens": float(self._num_trained)}

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions about the drafter since the last call."""
        return [] if self._publisher is None else self._publisher.drain_decisions()

    def drain_timeline(self) -> Timeline:
        """Return the timeline of all workers since the last call."""
        marks, self._marks = self._marks, []
        begin_s, end_s, spans = self._pool.states.drain()
        return Timeline(spans=spans, marks=tuple(marks), begin_s=begin_s, end_s=end_s)

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
        """Copy the published drafter, its texts, and the lengths of prompts; None without one."""
        if self._publisher is None:
            return None
        return self._publisher.state(lengths=self.lengths.state())

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve a published drafter again, with its texts.

        Raises CheckpointError if its tensors have other shapes.
        """
        assert self._publisher is not None, "there is a drafter to restore"
        weights = self._publisher.restore(state)
        self.lengths.restore(state.numbers["lengths"])
        self._pool.run_on_all(Worker.adopt, weights)

    # ---- helpers

    def _on_replaced(self, worker: int) -> None:
        self._team.is_stale = True
        self._forecast.speeds.forget(worker)

    def _begin_learning(
        self, groups: GroupStream | None, requests: Sequence[Request]
    ) -> LearningWork | None:
        """Return the learning from finished groups, if groups can be learned from by themselves."""
        if groups is None or self._pool.size == 1 or not self._settings.learns_ahead:
            return None
        sampling, token_s = requests[0].sampling, self._learn_token_s
        return LearningWork(self._pool, groups, token_s, sampling, self._log)

    def _hosts(self) -> dict[int, str]:
        """Return the hosts of the workers that are present; none if no cores can be lent."""
        lends = self._borrows and self._shares
        return {each: self._pool.processes.host_of(each) for each in self._pool.present if lends}

    def _begin_spot(self, step: int, requests: Sequence[Request]) -> DrafterWork | None:
        """Begin to collect texts, if there is a drafter that gradients train."""
        if self._publisher is None or self._publisher.sums is not None:
            return None
        return DrafterWork(self._pool, self._publisher, requests, step=step, log=self._log)

    def _expected(self, requests: Sequence[Request]) -> dict[str, float]:
        """Return the length of each group in earlier epochs, if it is known."""
        expected = {each.group_id: self.lengths.expected(_prompt_id(each)) for each in requests}
        return {group: length for group, length in expected.items() if length is not None}


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id
