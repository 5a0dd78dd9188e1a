"""All workers as one: what the loop rolls out, learns and publishes with.

    rollout(step, requests) -> Rolled          shards, spot training, offers
    learn(batches) -> LearnerReport            one update, everybody's share of it
    publish()                                  learner -> engine on every worker; then the drafter

Losing a worker costs time, never a text, a gradient or an update: what it was doing is done again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from torch import Tensor

from longtail.cluster.crew import Crew, Ended
from longtail.cluster.placement import LengthBook
from longtail.cluster.publisher import Decision, Publisher
from longtail.cluster.rollout import Rolled, Rollout
from longtail.cluster.roster import State
from longtail.cluster.shift import Shift, served_by
from longtail.cluster.timeline import Mark, Timeline
from longtail.cluster.worker import Progress, Worker
from longtail.drafter.buffer import DrafterBuffer
from longtail.drafter.spot import Replica
from longtail.drafter.weights import DrafterWeights
from longtail.errors import CheckpointError, ClusterError
from longtail.rl.learner import LearnerState
from longtail.rl.tally import LearnerReport
from longtail.types import Request, TrainBatch

Training = Literal["spot", "serial", "never"]
_LEARN_ATTEMPTS = 4
_SERIAL_SHARE = 0.1
"""Of the rollout's time: training after it, where that is asked for."""
_DRAFTER, _BUFFER = "drafter/", "buffer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """How workers work together.

    Example: FleetSettings(seed=0, training="spot", buffer_bytes=64 * 2**20, hang_s=120.0)
    """

    seed: int
    training: Training
    """When the drafter learns: on idle workers, after the rollout, or never."""
    buffer_bytes: int
    hang_s: float
    """A worker that makes no step for so long is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """The drafter in the middle of a run: what is published, and the texts to learn from."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]


@final
class Fleet:
    """Owns the crew. Lifecycle: `begin`, `restore` if the run goes on, `publish`, then steps."""

    def __init__(
        self,
        crew: Crew,
        settings: FleetSettings,
        *,
        listen: Callable[[Progress], None],
        say: Callable[[str], None],
        meeting_point: Callable[[], str] | None = None,
    ) -> None:
        self._crew, self._settings, self._listen = crew, settings, listen
        self._meeting_point = meeting_point
        self.shift = Shift(crew, settings.hang_s, say)
        self._buffer = DrafterBuffer(settings.buffer_bytes, seed=settings.seed)
        self._lengths = LengthBook()
        self._publisher: Publisher | None = None
        self._marks: list[Mark] = []
        self._replicas: list[Replica] = []
        self._rolled_s = 0.0

    def begin(self) -> float:
        """Wait for all workers; return the seconds that making their drafters took at most."""
        self.shift.wait_ready()
        seconds = self._all(State.LEARNING, Worker.ready)
        self.num_parameters = self._one(Worker.num_parameters)
        weights = self._one(Worker.drafter_weights)
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

    def rollout(self, step: int, requests: Sequence[Request], *, trains: bool = True) -> Rolled:
        """Serve all requests; `trains`: idle workers may train the drafter on these texts."""
        training = self._settings.training
        self._buffer.begin(step)
        self._rolling = Rollout(
            self.shift,
            self._publisher,
            self._buffer,
            self._listen,
            step=step,
            harvests=trains and training == "spot",
        )
        expected = {
            each.group_id: found
            for each in requests
            if (found := self._lengths.expected(_prompt_id(each))) is not None
        }
        rolled = self._rolling.run(requests, expected)
        for request, completion in zip(requests, rolled.completions, strict=True):
            self._lengths.note(_prompt_id(request), len(completion.tokens))
        if trains:
            self._replicas, self._rolled_s = self._rolling.replicas, rolled.seconds
        return rolled

    def timeline(self) -> Timeline:
        """Hand out what everybody did since the last time."""
        marks, self._marks = self._marks, []
        return Timeline.of(self.shift.roster.drain(), marks)

    def abandon(self) -> None:
        """Have everybody stop what they are doing."""
        self._rolling.abandon()

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step on all workers together; again, if one is lost before its end."""
        self.shift.wait_ready()
        several = sum(batch.num_generated > 0 for batch in batches) > 1
        before = self._crew.ask(0, Worker.policy_state) if several and self._crew.size > 1 else None
        for _ in range(_LEARN_ATTEMPTS):
            self._meet()
            found = self.shift.each(State.LEARNING, Worker.learn, batches)
            if not any(ended.is_lost for ended in found.values()):
                errors = [ended for ended in found.values() if ended.error is not None]
                report: LearnerReport = (errors or [found[0]])[0].value()
                return report
            self.shift.wait_ready()
            if before is not None:  # some of its updates may have been made
                self._all(State.LEARNING, Worker.restore, before)
                continue
            done = {worker: e.result for worker, e in found.items() if e.error is None}
            if done:  # it was lost after the sum: who has the update passes it on
                worker, report = next(iter(done.items()))  # the same of all
                state = self._crew.ask(worker, Worker.policy_state)
                self._all(State.LEARNING, Worker.restore, state)
                return report
        raise ClusterError(
            f"a learner step failed {_LEARN_ATTEMPTS} times; start again: the run resumes from "
            "its newest checkpoint"
        )

    def publish(self) -> None:
        """Hand the learners' weights to the engines, then the drafter that was trained to all."""
        self.shift.wait_ready()
        self._all(State.LEARNING, Worker.publish)
        if self._publisher is not None:
            self._publisher.begin()

    def offer_drafter(self) -> None:
        """Publish what spot workers made of the drafter, where that is better."""
        if self._publisher is None:
            return
        self.shift.wait_ready()
        if self._settings.training == "serial":
            self._train_serially(self._publisher.published)
        offer = self._publisher.offer(self._replicas)
        if offer is not None:
            self._publisher.note(self._all(State.LEARNING, Worker.adopt, offer))
            mark = f"drafter v{offer.weights.version} offered"
            self._marks.append(Mark(worker=0, at_s=time.perf_counter(), name=mark))

    def _train_serially(self, published: DrafterWeights) -> None:
        """Have one worker train while all others wait."""
        limit_s = _SERIAL_SHARE * self._rolled_s
        self._crew.ask(0, Worker.feed, self._rolling.texts)
        self.shift.start(0, State.SPOT, Worker.spot, published, limit_s)
        for ended in self._until_one():
            if not ended.is_lost:
                replica = ended.value().replica
                self._replicas = [] if replica is None else [replica]

    # ---- state

    def save_policy(self, path: Path) -> None:
        """Write the policy as a Hugging Face directory."""
        self._one(Worker.save_policy, path)

    def learner_state(self) -> LearnerState:
        """Copy what the next step depends on beside the weights."""
        state: LearnerState = self._one(Worker.policy_state).learner
        return state

    def restore(self, policy: Path, learner: LearnerState) -> None:
        """Put every learner where the checkpoint was taken."""
        self._all(State.LEARNING, Worker.restore_saved, policy, learner)

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
                "buffer": self._buffer.state(),
                "lengths": self._lengths.state(),
            },
        )

    def restore_drafter(self, state: DrafterState) -> None:
        """Serve the drafter that was published, and go on with its texts.

        Raises CheckpointError if it is another drafter's.
        """
        assert self._publisher is not None, "somebody drafts"
        tensors = {
            name.removeprefix(_DRAFTER): tensor
            for name, tensor in state.tensors.items()
            if name.startswith(_DRAFTER)
        }
        mine = {name: tensor.shape for name, tensor in self._publisher.published.tensors.items()}
        if mine != {name: tensor.shape for name, tensor in tensors.items()}:
            raise CheckpointError("the drafter of the checkpoint is of another shape")
        texts = {
            name.removeprefix(_BUFFER): tensor
            for name, tensor in state.tensors.items()
            if name.startswith(_BUFFER)
        }
        self._buffer.restore(texts, state.numbers["buffer"])
        self._lengths.restore(state.numbers["lengths"])
        weights = DrafterWeights(version=state.numbers["version"], tensors=tensors)
        self._publisher = Publisher(weights, self._buffer)
        self._all(State.LEARNING, Worker.adopt, self._publisher.present())

    def close(self) -> None:
        """End all workers."""
        self._crew.close()

    # ---- helpers

    def _meet(self) -> None:
        """Have the learners find each other, if somebody is new."""
        if not self.shift.is_team_stale or self._crew.size == 1:
            return
        for _ in range(_LEARN_ATTEMPTS):
            self.shift.is_team_stale = False
            assert self._meeting_point is not None, "several workers meet somewhere"
            address, size = self._meeting_point(), self._crew.size
            for worker in range(size):
                self.shift.start(
                    worker,
                    State.LEARNING,
                    Worker.join,
                    worker,
                    size,
                    address,
                    self._settings.hang_s,
                )
            ends: dict[int, Ended] = {}
            while len(ends) < size:
                ends.update((ended.worker, ended) for ended in self.shift.wait(0.5))
            if all(ended.error is None for ended in ends.values()):
                return
            self.shift.is_team_stale = True
            self.shift.wait_ready()
        raise ClusterError("the workers cannot find each other; see that they share a network")

    def _one(self, task: Callable[..., Any], *args: object) -> Any:
        """Have the first worker do something that all could."""
        self.shift.wait_ready()
        self.shift.start(0, State.LEARNING, task, *args)
        while True:
            for ended in self.shift.wait(0.5):
                return ended.value()

    def _all(self, state: State, task: Callable[..., Any], *args: object) -> list[Any]:
        """Have everybody do the same; those who are lost have it done when they are back."""
        found = served_by(self.shift.each(state, task, *args))
        while len(found) < self._crew.size:
            self.shift.wait_ready()
            for worker in set(range(self._crew.size)) - found.keys():
                self.shift.start(worker, state, task, *args)
                ended = next(iter(self._until_one()))
                if not ended.is_lost:
                    found[worker] = ended.value()
        return [found[worker] for worker in sorted(found)]

    def _until_one(self) -> list[Ended]:
        while True:
            if found := self.shift.wait(0.5):
                return found


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id
