"""All workers as one: what the loop rolls out, learns and publishes with.

    rollout(step, requests) -> RolloutResult          shards, spot training, offers
    learn(batches) -> LearnerReport            one update, everybody's share of it
    publish()                                  learner -> engine on every worker; then the drafter

Losing a worker costs time, never a text, a gradient or an update: what it was doing is done again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from longtail.cluster.placement import LengthHistory
from longtail.cluster.pool import TaskResult, WorkerPool
from longtail.cluster.probe import Probe
from longtail.cluster.publisher import Decision, Publisher
from longtail.cluster.records import Progress
from longtail.cluster.rollout import Rollout, RolloutResult
from longtail.cluster.spot import SpotCoordinator
from longtail.cluster.states import State
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.timeline import Mark, Timeline
from longtail.cluster.worker import Worker
from longtail.drafter.eagle.weights import DrafterWeights
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.errors import CheckpointError, ClusterError, TeamError
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.types import Request, TrainBatch

Training = Literal["spot", "serial", "never"]
_ATTEMPTS = 4
"""At what several do together: a loss undoes it for all."""
_SERIAL_SHARE = 0.1
"""Of the rollout's time: training after it, where that is asked for."""
_DRAFTER, _BUFFER = "drafter/", "buffer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGroupSettings:
    """How workers work together.

    Example: WorkerGroupSettings(seed=0, training="spot", buffer_bytes=64 * 2**20, hang_s=120.0,
                                 is_sharded=False)
    """

    seed: int
    training: Training
    """When the drafter learns: on idle workers, after the rollout, or never."""
    buffer_bytes: int
    hang_s: float
    """A worker that makes no step for so long is replaced."""
    is_sharded: bool = False
    """A worker holds its shard of the policy alone: none can be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """The drafter in the middle of a run: what is published, and the texts to learn from."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def drafter(self) -> dict[str, Tensor]:
        """Return the drafter's own parameters."""
        return _part(self.tensors, _DRAFTER)


@final
class WorkerGroup:
    """Owns the pool. Lifecycle: `begin`, `restore` if the run goes on, `publish`, then steps."""

    def __init__(
        self,
        pool: WorkerPool,
        settings: WorkerGroupSettings,
        *,
        on_progress: Callable[[Progress], None],
        log: Callable[[str], None],
        meeting_point: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool, self._settings, self._on_progress = pool, settings, on_progress
        self._meeting_point = meeting_point
        self.supervisor = WorkerSupervisor(
            pool, settings.hang_s, log, clock, is_sharded=settings.is_sharded
        )
        self.num_parameters = 0
        """Of the policy; known from `begin` on."""
        self._buffer = DrafterBuffer(settings.buffer_bytes, seed=settings.seed)
        self.lengths = LengthHistory()
        """Of earlier epochs: rollouts are placed by them, and add to them."""
        self._publisher: Publisher | None = None
        self._spot: SpotCoordinator | None = None
        """Of the last rollout that was to be learned from."""
        self._rolled_s = 0.0
        """That it took."""
        self._marks: list[Mark] = []

    def begin(self) -> float:
        """Wait for all workers; return the seconds that making their drafters took at most."""
        seconds: list[float] = self._all(Worker.ready)
        self.num_parameters = self._one(Worker.num_parameters)
        weights: DrafterWeights | None = self._one(Worker.drafter_weights)
        if weights is not None:
            self._publisher = Publisher(weights, self._buffer)
        return max(seconds)

    @property
    def decisions(self) -> list[Decision]:
        """Hand out what was decided about the drafter since the last time."""
        return [] if self._publisher is None else self._publisher.drain()

    @property
    def published(self) -> DrafterWeights | None:
        """The drafter that is served."""
        return None if self._publisher is None else self._publisher.published

    def rollout(
        self, step: int, requests: Sequence[Request], *, trains: bool = True
    ) -> RolloutResult:
        """Serve all requests; `trains`: the drafter may learn these texts."""
        spot = self._new_spot(step) if trains else None
        rollout = Rollout(self.supervisor, self._publisher, spot, self._on_progress)
        rolled = rollout.run(requests, self._expected(requests))
        for request, completion in zip(requests, rolled.completions, strict=True):
            self.lengths.note(_prompt_id(request), len(completion.tokens))
        if spot is not None:
            self._spot, self._rolled_s = spot, rolled.seconds
            self._marks += spot.marks
        return rolled

    def abandon(self) -> None:
        """Have everybody stop what they are doing: a rollout was interrupted."""
        self.supervisor.abandon()

    def timeline(self) -> Timeline:
        """Hand out what everybody did since the last time."""
        marks, self._marks = self._marks, []
        return Timeline.of(self.supervisor.states.drain(), marks)

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step on all workers together; again, if it is lost with one of them.

        A learner that loses its team changes nothing. So either nobody has made the step, or those
        who have pass it on as they meet again: it is made once.
        """
        size = self._pool.size
        for _ in range(_ATTEMPTS):
            self._meet()
            found = self.supervisor.run(
                State.LEARNING, Worker.learn, dict.fromkeys(range(size), (batches,))
            )
            _raise_own_errors(found)
            done = [worker for worker, ended in found.items() if ended.error is None]
            if len(done) < size:
                self.supervisor.is_team_stale = True
            if done:
                report: LearnerReport = found[done[0]].result  # the same of all
                self._meet(report.version)
                return report
        raise ClusterError(
            f"a learner step failed {_ATTEMPTS} times; start again: the run resumes from its "
            "newest checkpoint"
        )

    def publish(self) -> None:
        """Hand the learners' weights to the engines."""
        self._all(Worker.publish)

    def offer_drafter(self) -> None:
        """Publish what was made of the drafter since the last time, where that is better."""
        publisher, spot = self._publisher, self._spot
        if publisher is None or spot is None:
            return
        if self._settings.training == "serial":
            self._train_serially(publisher.published, spot)
        publisher.withdraw()
        self._spot = None
        offer = publisher.offer(spot.replicas)
        if offer is None:
            return
        mark = f"drafter v{offer.weights.version} offered"
        self._marks.append(Mark(worker=0, at_s=self.supervisor.clock(), name=mark))
        publisher.note(self._all(Worker.adopt, offer))
        self._told(publisher, offer.weights.version)

    # ---- state

    def save_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._one(Worker.save_policy, path)

    def learner_state(self) -> LearnerState:
        """Copy what the next step depends on beside the weights; of shards, all rows."""
        for _ in range(_ATTEMPTS):
            self._meet()
            tensors: dict[str, Tensor] = {}
            for worker in range(self._pool.size if self._settings.is_sharded else 1):
                state: LearnerState = self._each((worker,), Worker.learner_state)[0]
                for name, rows in state.tensors.items():
                    if name not in tensors:
                        tensors[name] = rows
                    elif rows.dim() > 0:
                        tensors[name] = torch.cat((tensors[name], rows))
            if self._pool.size == 1 or not self.supervisor.is_team_stale:
                return LearnerState(tensors=tensors, numbers=state.numbers)
        raise ClusterError(f"the learner's state could not be copied in {_ATTEMPTS} attempts")

    def restore(self, policy: Path, learner: LearnerState) -> None:
        """Put every learner where the checkpoint was taken."""
        self._all(Worker.restore_saved, policy, learner)

    def save_drafter(self, path: Path) -> None:
        """Write the drafter that the workers were given as a drafter directory."""
        self._one(Worker.save_drafter, path)

    def probe_drafter(self, requests: Sequence[Request]) -> Probe | None:
        """Have one worker measure the drafter that it was given on what the policy writes now."""
        found: Probe | None = self._one(Worker.probe_drafter, requests)
        return found

    def drafter_state(self) -> DrafterState | None:
        """Copy the published drafter, its texts, and the lengths of prompts; None without one."""
        if self._publisher is None:
            return None
        weights, texts = self._publisher.published, self._buffer.tensors()
        return DrafterState(
            tensors={_DRAFTER + name: tensor for name, tensor in weights.tensors.items()}
            | {_BUFFER + name: tensor for name, tensor in texts.items()},
            numbers={
                "version": weights.version,
                "accept_len": self._publisher.accept_len,
                "buffer": self._buffer.state(),
                "lengths": self.lengths.state(),
            },
        )

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve the drafter that was published, and go on with its texts.

        Raises CheckpointError if it is another drafter's.
        """
        assert self._publisher is not None, "somebody drafts"
        tensors = state.drafter()
        mine = {name: tensor.shape for name, tensor in self._publisher.published.tensors.items()}
        if mine != {name: tensor.shape for name, tensor in tensors.items()}:
            raise CheckpointError("the drafter of the checkpoint is of another shape")
        self._buffer.restore(_part(state.tensors, _BUFFER), state.numbers["buffer"])
        self.lengths.restore(state.numbers["lengths"])
        weights = DrafterWeights(version=state.numbers["version"], tensors=tensors)
        offer = self._publisher.restore(weights, state.numbers.get("accept_len"))
        self._all(Worker.adopt, offer)
        self._told(self._publisher, weights.version)

    def close(self) -> None:
        """End all workers."""
        self._pool.close()

    # ---- helpers

    def _new_spot(self, step: int) -> SpotCoordinator | None:
        """Begin to collect texts, if there is a drafter to learn them."""
        if self._publisher is None:
            return None
        lends = self._settings.training == "spot"
        return SpotCoordinator(
            self.supervisor, self._publisher, self._buffer, step=step, lends=lends
        )

    def _expected(self, requests: Sequence[Request]) -> dict[str, float]:
        """Return how long the groups were in earlier epochs, where that is known."""
        expected = {each.group_id: self.lengths.expected(_prompt_id(each)) for each in requests}
        return {group: length for group, length in expected.items() if length is not None}

    def _train_serially(self, published: DrafterWeights, spot: SpotCoordinator) -> None:
        """Have one worker train while all others wait."""
        self.supervisor.wait_ready()
        spot.feed(0)
        args = (published, _SERIAL_SHARE * self._rolled_s)
        ended = self.supervisor.run(State.SPOT, Worker.spot, {0: args})[0]
        if not ended.is_lost:
            spot.note(ended)

    def _told(self, publisher: Publisher, version: int) -> None:
        """Note that all workers were offered a drafter, those that had begun anew included."""
        self.supervisor.newcomers.clear()
        for worker in range(self._pool.size):
            publisher.told(worker, version)

    def _meet(self, version: int | None = None) -> None:
        """Have the learners find each other, if somebody is new, and all be where the newest is.

        Raises ClusterError if that is not the version that somebody had, where one is given.
        """
        size = self._pool.size
        self.supervisor.wait_ready()
        for _ in range(_ATTEMPTS):
            if size == 1 or not self.supervisor.is_team_stale:
                return
            address = self._address()
            if address is None:
                continue
            rest = (size, address, self._settings.hang_s)
            found = self.supervisor.run(
                State.LEARNING, Worker.join, {rank: (rank, *rest) for rank in range(size)}
            )
            _raise_own_errors(found)
            self.supervisor.is_team_stale = any(ended.error is not None for ended in found.values())
            if version is not None and any(
                e.result != version for e in found.values() if not e.error
            ):
                raise ClusterError(
                    "whoever had made the learner step is lost; start again: the run resumes from "
                    "its newest checkpoint"
                )
            self.supervisor.wait_ready()
        if self.supervisor.is_team_stale:
            raise ClusterError(
                "the workers cannot find each other; see that they share a network, then start "
                "again: the run resumes from its newest checkpoint"
            )

    def _address(self) -> str | None:
        """Return where to meet; None if the first worker, which knows, is gone."""
        assert self._meeting_point is not None, "several workers meet somewhere"
        try:
            return self._meeting_point()
        except ClusterError as error:
            self.supervisor.give_up(0, str(error))
            self.supervisor.wait_ready()
            return None

    def _one(self, task: Callable[..., Any], *args: object) -> Any:
        """Have the first worker do something that all could."""
        return self._each((0,), task, *args)[0]

    def _all(self, task: Callable[..., Any], *args: object) -> list[Any]:
        """Have everybody do the same; return the results by worker."""
        return self._each(range(self._pool.size), task, *args)

    def _each(self, workers: Sequence[int], task: Callable[..., Any], *args: object) -> list[Any]:
        """Have some workers do the same; those who are lost do it when they are back."""
        found: dict[int, Any] = {}
        while missing := [worker for worker in workers if worker not in found]:
            ends = self.supervisor.run(State.LEARNING, task, dict.fromkeys(missing, args))
            found |= {worker: e.value() for worker, e in ends.items() if not e.is_lost}
        return [found[worker] for worker in workers]


def _raise_own_errors(found: Mapping[int, TaskResult]) -> None:
    """Raise what is no consequence of a member being lost."""
    for ended in found.values():
        if not ended.is_lost and not isinstance(ended.error, TeamError):
            ended.value()


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id
