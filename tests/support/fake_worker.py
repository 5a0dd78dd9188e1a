"""A fake worker in simulated time, see `scripted_pool`.

Its text is a function of the request, its policy is the list of the batches that were learned, and
its drafter is one number, the expected accept length. Tasks are generators that yield the seconds
to their next step.
"""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from longtail.cluster.records import PolicyState, Progress, ShardResult
from longtail.cluster.workers.worker import Stopped
from longtail.drafter.training.buffer import SequenceSnapshot
from longtail.drafter.training.replica_gain import Replica, SpotEnd, SpotReport
from longtail.drafter.weights import DrafterWeights
from longtail.engine.report import RolloutReport
from longtail.errors import NonFiniteError, ProcessGroupError
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerMetrics, LearnerReport
from longtail.types import Completion, MicroBatch, Request, SamplingParams, TrainBatch
from support.rollouts import completion

if TYPE_CHECKING:
    from support.scripted_pool import ScriptedPool

WORKER_TIMEOUT_S = 60.0
TOKEN_S, BEAT_S = 0.1, 0.1
READY_S, LEARN_S, REPORT_S = 3.0, 2.0, 0.5
"""Seconds for a process to start, to the sum of gradients, and from there to the end of a step."""
QUALITY = 2.0
"""Expected accept length of the drafter that workers begin with."""
Steps = Generator[float, None, Any]
"""A task in simulated time: it yields the seconds to its next step, and returns its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault in a worker's `nth` task of a name, counted over all its processes."""

    worker: int
    task: str
    nth: int = 0
    after_s: float = 0.0
    kind: str = "lost"
    """lost: the process dies; hangs: it makes no more steps; frozen: it answers no message, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A fault in a worker's process at a time, busy or idle; kinds lost and frozen of `Fault`."""

    worker: int
    at_s: float
    kind: str = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A time in which no host has room for a new process of a worker."""

    worker: int
    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotScript:
    """The course of one call of `train_drafter`."""

    measures_s: float = 2.0
    """Seconds between measurements."""
    gain: float = 0.05
    """Relative gain of each measurement over the one before."""
    ends_s: float = math.inf
    reason: SpotEnd = SpotEnd.NO_SEQUENCES
    stop_s: float = 0.05
    """Seconds from `stop` to the end; infinite: it never stops."""
    error: Exception | None = None


@dataclass(slots=True, kw_only=True)
class Script:
    """The durations and faults of a simulation."""

    learn_s: float = LEARN_S
    token_s: Callable[[int], float] = lambda num_running: TOKEN_S
    """Seconds in which each of the running requests grows by a token."""
    max_running: int = 64
    accumulate_s: float = 0.01
    """Seconds of learning from a token."""
    short_task_s: float = 0.01
    """Seconds of a task without steps."""
    faults: Sequence[Fault] = ()
    deaths: Sequence[Death] = ()
    absences: Sequence[Absence] = ()
    late: dict[tuple[int, str], int] = field(default_factory=dict)
    """Number of late answers by worker and message."""
    spot_scripts: Callable[[int, int], SpotScript] = lambda worker, nth: SpotScript()
    """Course of each spot training, by worker and number."""
    has_drafter: bool = True
    broken_steps: Sequence[int] = ()
    """Batches whose loss is not finite."""
    torn: Sequence[int] = ()
    """Members that lose the team at the very end of its first step."""
    bad_meetings: int = 0
    """Number of first meetings at which no member finds another."""


VOCABULARY = 1000
"""Number of tokens, more than any text has."""


def text(request: Request) -> tuple[int, ...]:
    """Return the text that every worker generates for a request."""
    key = request.noise_key
    return tuple((key // 1000 * 31 + 7 * place) % 97 + 2 for place in range(key % 1000))


def drafter(version: int, quality: float) -> DrafterWeights:
    tensors = {"w": torch.tensor([quality])}
    return DrafterWeights(version=version, tensors=tensors, vocab_size=VOCABULARY)


@final
class FakeWorker:
    """A worker with the methods of `Worker`; its state is lost with its process."""

    def __init__(self, pool: "ScriptedPool", number: int) -> None:
        self._crew, self._script, self.number = pool, pool.script, number
        self.is_dead = self.is_frozen = self._is_stopped = False
        self.policy: tuple[int, ...] = ()
        """Batches that were learned, in order, in place of weights."""
        self.engine: tuple[int, ...] | None = None
        self.served = drafter(0, QUALITY)
        self.received: list[SequenceSnapshot] = []
        """All texts that it received by `add_sequences`."""
        self.team: str | None = None
        self._team_size = 1
        self._base: DrafterWeights | None = None
        self._quality = QUALITY
        self._learned = self._stretches = 0
        self._best: Replica | None = None
        self._shard: dict[str, Request] = {}
        self._left: dict[str, int] = {}
        """Tokens that each unfinished request has left."""
        self._finished: list[Completion] = []
        self.held: list[str] = []
        """Names of the micro-batches in its sums."""
        self._num_written = self._beats = 0
        self._is_waiting = False

    # ---- tasks

    def ready(self) -> Steps:
        yield READY_S

    def generate(self, shard: Sequence[Request], learns: bool = False) -> Steps:
        assert self.engine is not None, "a policy is published before texts are generated"
        self._shard, self._finished = {each.request_id: each for each in shard}, []
        self._left = {name: each.noise_key % 1000 for name, each in self._shard.items()}
        self._num_written = 0
        while self._left:
            yield self._script.token_s(len(self._running()))
            for name in self._running():
                self._num_written += 1
                self._left[name] -= 1
                if not self._left[name]:
                    del self._left[name]
                    self._finished.append(self._completion(self._shard[name]))
            self._beats += 1
            if self._is_stopped:
                raise Stopped
        return ShardResult(
            completions=tuple(self._finished),
            report=RolloutReport(num_generated=self._num_written),
            series=None,
        )

    def _running(self) -> list[str]:
        return list(self._left)[: self._script.max_running]

    def accumulate(self, micro_batch: MicroBatch, sampling: SamplingParams) -> Steps:
        yield self._script.accumulate_s * micro_batch.packed.num_tokens
        self._beats += 1
        self.held.append(micro_batch.name)

    def train_drafter(self, published: DrafterWeights, limit_s: float = math.inf) -> Steps:
        spot_script = self._script.spot_scripts(self.number, self._stretches)
        self._stretches += 1
        if self._base is None or self._base.version != published.version:
            self._base, self._learned = published, 0
            self._quality = published.tensors["w"].item()
        self._best, elapsed = None, 0.0
        while elapsed < min(spot_script.ends_s, limit_s):
            if self._is_stopped and spot_script.stop_s < math.inf:
                yield spot_script.stop_s
                return self._report(SpotEnd.STOPPED)
            yield BEAT_S
            elapsed += BEAT_S
            self._beats += 1
            self._learned += 100
            if round(elapsed / BEAT_S) % round(spot_script.measures_s / BEAT_S) == 0:
                self._quality *= 1 + spot_script.gain
                self._best = self._measured()
        if spot_script.error is not None:
            raise spot_script.error
        return self._report(
            spot_script.reason if elapsed >= spot_script.ends_s else SpotEnd.STOPPED
        )

    def adopt(self, weights: DrafterWeights) -> int:
        self.served = weights
        return weights.version

    def join(self, rank: int, size: int, address: str, timeout_s: float) -> Steps:
        here = self._crew.meetings.setdefault(address, [])
        here.append(self)
        waited = 0.0
        self._team_size = size
        while len(here) < size or int(address.removeprefix("tcp://")) < self._script.bad_meetings:
            yield BEAT_S
            waited += BEAT_S
            if waited > timeout_s or any(member.is_dead for member in here):
                raise ProcessGroupError("a member did not join")
        assert here[0].number == 0 or rank, "ranks ascend with the workers"
        self.team = address
        self.policy = max((member.policy for member in here), key=len)
        return len(self.policy)

    def learn(self, batches: Sequence[TrainBatch]) -> Steps:
        if self._team_size > 1:
            try:
                yield from self._sum()
            finally:
                self._is_waiting = False
        number = batches[0].num_generated
        if number in self._script.broken_steps:
            raise NonFiniteError(f"batch {number}")
        self.policy += (number,)
        yield REPORT_S
        report: LearnerReport = LearnerMetrics().report(len(self.policy), ())
        return report

    def publish(self) -> int:
        self.engine = self.policy
        return len(self.policy)

    def continue_run(self, state: PolicyState, drafter: DrafterWeights | None) -> None:
        self.policy = tuple(state.weights["learned"].tolist())
        self.publish()
        if drafter is not None:
            self.adopt(drafter)

    def restore_saved(self, directory: Path, learner: LearnerState) -> None:
        self.policy = tuple(range(learner.numbers["version"]))

    def save_policy(self, path: Path) -> None:
        path.write_text(f"{self.policy}")

    def drafter(self) -> tuple[DrafterWeights, None] | None:
        return (self.served, None) if self._script.has_drafter else None

    def _sum(self) -> Steps:
        """Sum the gradients of the team."""
        team, pool = self.team, self._crew
        if team is None:
            raise ProcessGroupError("the team is closed")
        members, came = pool.meetings[team], pool.rounds.setdefault((team, len(self.policy)), [])
        for _ in range(round(self._script.learn_s / BEAT_S)):
            yield BEAT_S
            self._beats += 1
        came.append(self)
        waited, self._is_waiting = 0.0, True
        while len(came) < self._team_size:
            if waited > WORKER_TIMEOUT_S or any(one.is_dead or one.team != team for one in members):
                self.team = None
                raise ProcessGroupError("a member is gone")
            yield BEAT_S
            waited += BEAT_S
        if self.number in self._script.torn and team == "tcp://0":
            self.team = None
            raise ProcessGroupError("the sum was not received")

    # ---- messages

    def clear_stop(self) -> None:
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True

    def progress(self) -> Progress:
        return Progress(
            beats=self._beats,
            num_finished=len(self._finished),
            num_generated=self._num_written,
            num_running=len(self._running()),
            is_waiting=self._is_waiting,
        )

    def policy_state(self) -> PolicyState:
        return PolicyState(
            weights={"learned": torch.tensor(self.policy, dtype=torch.int64)},
            learner=LearnerState(tensors={}, numbers={"version": len(self.policy)}),
        )

    def learner_state(self) -> LearnerState:
        return LearnerState(
            tensors={"step": torch.tensor(self.number), "rows": torch.tensor([self.number])},
            numbers=self.policy_state().learner.numbers,
        )

    def sequences(self, step: int) -> list[SequenceSnapshot]:
        return [self._written(self._shard[name], step) for name in self._left]

    def completed(self, first: int) -> list[Completion]:
        return self._finished[first:]

    def add_sequences(self, texts: Sequence[SequenceSnapshot]) -> None:
        self.received += texts

    # ---- parts

    def _written_of(self, request: Request) -> tuple[int, ...]:
        return text(request)[: request.noise_key % 1000 - self._left.get(request.request_id, 0)]

    def _written(self, request: Request, step: int) -> SequenceSnapshot:
        return SequenceSnapshot(
            request_id=request.request_id,
            tokens=(*request.prompt_tokens, *self._written_of(request)),
            prompt_len=len(request.prompt_tokens),
            step=step,
        )

    def _completion(self, request: Request) -> Completion:
        assert self.engine is not None
        version = len(self.engine)
        return completion(request.request_id, text(request), policy_version=version)

    def _measured(self) -> Replica:
        assert self._base is not None
        return Replica(
            base_version=self._base.version,
            weights={"w": torch.tensor([self._quality])},
            num_tokens=self._learned,
            seconds=self._learned / 100 * BEAT_S,
            accept_len=self._quality,
            base_accept_len=self._base.tensors["w"].item(),
        )

    def _report(self, reason: SpotEnd) -> SpotReport:
        return SpotReport(
            num_steps=self._learned // 100,
            num_tokens=self._learned,
            num_reused=self._learned // 2,
            seconds=1.0,
            reason=reason,
            replica=None if reason is SpotEnd.NOT_FINITE else self._best,
        )
