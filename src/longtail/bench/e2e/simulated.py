"""Training steps of more workers in simulated time.

    texts and speeds of a run ---> Workers <--- WorkerGroup: rollout, learn, publish

The code of a run decides who generates, learns ahead or hands requests on. Only its workers are a
model, whose work takes time and has no result: n running texts grow by a token in a + b n seconds,
known tokens of a text that moved are read in a + b tokens, and learning takes seconds for a token.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast, final

from longtail.assembly.trainer import group_settings
from longtail.bench.e2e.arms import Texts
from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress, ShardResult
from longtail.cluster.workers.pool import TaskResult, WorkerPool
from longtail.config.rl import RunConfig
from longtail.engine.report import RolloutMeter
from longtail.errors import ClusterError
from longtail.rl.collectives import balance
from longtail.rl.data.requests import visit_of
from longtail.rl.learner_metrics import LearnerMetrics
from longtail.types import Completion, FinishReason, Request, SamplingParams

R = TypeVar("R")

MESSAGE_S = 0.002
"""Seconds of one `RayWorkerPool.ask` beside a busy task: median 1.6 ms, mean 2.6 ms of 300 on two
cores that others used, too."""


class Messages(NamedTuple):
    """Seconds of messages: to give a task and take its result, to ask a worker and wait for the
    answer, and what each further worker adds where several are asked at once."""

    task_s: float = MESSAGE_S
    ask_s: float = MESSAGE_S
    more_s: float = 0.0003


_USUAL = Messages()


class Speeds(NamedTuple):
    """Seconds of a step's work: a and b of its tokens, of learning from a token, of an update
    beside that (all-reduce, optimizer), of publishing, and of everything else."""

    start_s: float
    text_s: float
    learn_token_s: float
    update_s: float
    publish_s: float
    others_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Sums over simulated steps, or over measured ones."""

    rollout_s: float
    step_s: float
    idle_share: float
    """Share of the workers' time in which they do not generate or learn after the rollout."""
    messages_s: float = 0.0
    """Seconds of messages in a step."""
    coordinator_s: float = field(default=0.0, compare=False)
    """CPU seconds of a step in this process, without those of simulating the workers."""


def simulate(
    config: RunConfig,
    steps: Sequence[tuple[Sequence[Texts], Speeds]],
    workers: int,
    messages: Messages = _USUAL,
) -> Simulated:
    """Make steps of given texts and speeds with a number of workers."""
    sampling = SamplingParams(max_tokens=config.rollout.max_tokens)
    pool = _Pool(workers, config.rollout.max_running, steps[0][1], messages)
    group = WorkerGroup(
        pool,
        group_settings(config),
        on_progress=lambda _: None,
        log=lambda _: None,
        clock=lambda: pool.now_s,
    )
    group.begin()
    group.publish()
    rollout_s = step_s = idle_s = 0.0
    began_s, pool.messages_s, pool.model_s = time.process_time(), 0.0, 0.0
    for number, (texts, speeds) in enumerate(steps, start=1):
        pool.speeds, began = speeds, pool.now_s
        group.drain_timeline()
        units = {each.name: each.units(config.learner.tokens_per_micro_batch) for each in texts}
        requests = [request for each in texts for request in each.requests(sampling)]
        group.rollout(number, requests, _Groups(requests, units))
        rollout_s += pool.now_s - began
        pool.units = [unit for each in units.values() for unit in each]
        group.learn(())
        group.publish()
        pool.now_s += speeds.others_s
        step_s += pool.now_s - began
        states = group.drain_timeline().metrics()
        idle_s += states["cluster/idle_s"] + states["cluster/learning_ahead_s"]
    return Simulated(
        rollout_s=rollout_s,
        step_s=step_s,
        idle_share=idle_s / (step_s * workers),
        messages_s=pool.messages_s / len(steps),
        coordinator_s=(time.process_time() - began_s - pool.model_s) / len(steps),
    )


def resampled(steps: Sequence[Sequence[Texts]], factor: float) -> Sequence[Sequence[Texts]]:
    """Return steps with `factor` times as many prompts, drawn from those of all steps."""
    if factor == 1.0:
        return steps
    draws, every = random.Random(0), [each for step in steps for each in step]
    return [
        [
            draws.choice(every)._replace(name=f"{i}@{number}")
            for i in range(round(len(step) * factor))
        ]
        for number, step in enumerate(steps)
    ]


@final
class _Groups:
    """Groups that are graded at once."""

    def __init__(self, requests: Iterable[Request], units: Mapping[str, list[Any]]) -> None:
        self._left, self._units = {each.request_id for each in requests}, dict(units)

    def add(self, completions: Iterable[Completion]) -> None:
        self._left -= {each.request_id for each in completions}

    def micro_batches(self) -> list[Any]:
        graded = self._units.keys() - {visit_of(name) for name in self._left}
        found = [name for name in self._units if name in graded]
        return [unit for name in found for unit in self._units.pop(name)]


@final
class _Pool(WorkerPool):
    """Workers whose work takes simulated time; none is ever lost."""

    def __init__(self, size: int, max_running: int, speeds: Speeds, messages: Messages) -> None:
        self.now_s, self.speeds, self.max_running = 0.0, speeds, max_running
        self.messages, self.messages_s, self.model_s = messages, 0.0, 0.0
        self.units: Sequence[Any] = ()
        """Micro-batches of the present step."""
        self.learn_s = 0.0
        self.workers = [_Worker(self) for _ in range(size)]

    @property
    def size(self) -> int:
        return len(self.workers)

    @contextmanager
    def _message(self, seconds: float) -> Iterator[None]:
        """Take the time of messages; what the workers do is not the coordinator's work."""
        self.now_s += seconds
        self.messages_s += seconds
        began_s = time.process_time()
        yield
        self.model_s += time.process_time() - began_s

    def start(self, worker: int, task: Callable[..., object], *args: object) -> None:
        with self._message(self.messages.task_s):
            self._answer(worker, task, *args)

    def wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        with self._message(0.0):
            return self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> list[TaskResult[Any]]:
        deadline = self.now_s + timeout_s
        while (wakes_s := min(each.wakes_s for each in self.workers)) <= deadline:
            self.now_s = max(self.now_s, wakes_s)
            ended = [
                TaskResult(worker=worker, result=result)
                for worker, each in enumerate(self.workers)
                if each.wakes_s <= self.now_s
                for result in each.drain_ended()
            ]
            if ended:
                return ended
        self.now_s = deadline
        return []

    def ask(self, worker: int, message: Callable[..., R], *args: object) -> R:
        with self._message(self.messages.ask_s):
            return cast(R, self._answer(worker, message, *args))

    def _answer(self, worker: int, called: Callable[..., Any], *args: object) -> Any:
        self.workers[worker].advance()
        return getattr(self.workers[worker], called.__name__)(*args)

    def answers(
        self, message: Callable[..., R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, R | ClusterError]:
        with self._message(self._together_s(len(args))):
            return {worker: self._answer(worker, message, *own) for worker, own in args.items()}

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        with self._message(self._together_s(len(workers))):
            return {worker: self.workers[worker].progress() for worker in workers}

    def _together_s(self, num_workers: int) -> float:
        more = max(num_workers - 1, 0)
        return self.messages.ask_s * min(num_workers, 1) + self.messages.more_s * more

    def rendezvous_address(self) -> str:
        return ""

    def replace(self, worker: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@final
class _Worker:
    """The tasks and messages of `Worker` that take part in a step."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.wakes_s = 0.0
        """Time of its next change, the end of a text or of its task; infinite if it is idle."""
        self.held: list[str] = []
        self._result: object = None
        self._at_s, self._num_written = 0.0, 0
        """Time up to which its texts are written, and their tokens."""
        self._requests: dict[str, Request] = {}
        self._left: dict[str, int] = {}
        """Tokens left of each text; the first ones run, others wait."""
        self._finished: list[Completion] = []
        self._released: list[Completion] = []

    def advance(self) -> None:
        """Write texts until now."""
        while running := list(self._left)[: self._pool.max_running]:
            token_s, least = self._read_s(len(running)), min(self._left[n] for n in running)
            num = min(least, int((self._pool.now_s - self._at_s) / token_s + 1e-9))
            if num <= 0:
                self.wakes_s = self._at_s + least * token_s
                return
            self._at_s += num * token_s
            self._num_written += num * len(running)
            for name in running:
                self._left[name] -= num
                if not self._left[name]:
                    self._finished.append(self._taken(name))
            self.wakes_s = self._at_s

    def drain_ended(self) -> list[object]:
        """Return the result of its task, if that has ended."""
        self.advance()
        if self._left or self.wakes_s > self._pool.now_s:
            return []
        self.wakes_s = math.inf
        if self._result is not self._finished:
            return [self._result]
        report = RolloutMeter().report()
        return [ShardResult(completions=tuple(self._finished), report=report, series=None)]

    def _read_s(self, num_tokens: int) -> float:
        return self._pool.speeds.start_s + self._pool.speeds.text_s * num_tokens

    def _taken(self, name: str) -> Completion:
        return Completion(
            request_id=name,
            tokens=(0,) * (self._requests[name].noise_key - self._left.pop(name)),
            logprobs=(),
            text="",
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )

    # ---- tasks

    def ready(self, *_: object, seconds: float = 0.0, result: object = None) -> None:
        self.wakes_s, self._result = self._pool.now_s + seconds, result

    num_parameters = drafter = join = ready

    def publish(self) -> None:
        self.held = []
        self.ready(seconds=self._pool.speeds.publish_s)

    def accumulate(self, unit: Any, _: SamplingParams) -> None:
        self.held.append(unit.name)
        self.ready(seconds=self._pool.speeds.learn_token_s * unit.packed.num_tokens)

    def learn(self, _: object) -> None:
        """Learn from what no worker has learned from, as long as the busiest one."""
        pool = self._pool
        if self is pool.workers[0]:
            held = {name for each in pool.workers for name in each.held}
            tokens = [each.packed.num_tokens for each in pool.units if each.name not in held]
            most = max(sum(tokens[i] for i in part) for part in balance(tokens, pool.size))
            pool.learn_s = pool.speeds.update_s + pool.speeds.learn_token_s * most
        self.ready(seconds=pool.learn_s, result=LearnerMetrics().report(0, ()))

    def generate(self, requests: Sequence[Request], _: bool, begun: Sequence[Completion]) -> None:
        self._at_s, self._num_written, self._requests = self._pool.now_s, 0, {}
        self._result = self._finished = []
        self.add(requests, begun)

    # ---- messages

    def add(self, requests: Sequence[Request], begun: Sequence[Completion]) -> None:
        """Read what is written of some requests, and go on with them."""
        written = {each.request_id: len(each.tokens) for each in begun if each.tokens}
        for each in requests:
            self._requests[each.request_id] = each
            self._left[each.request_id] = each.noise_key - written.get(each.request_id, 0)
        if written:
            known = sum(len(r.prompt_tokens) for r in requests if r.request_id in written)
            read_s = self._read_s(known + sum(written.values()))
            self._at_s = max(self._at_s, self._pool.now_s) + read_s
        self.advance()

    def release(self, names: Sequence[str]) -> None:
        for name in [each for each in names if each in self._left]:
            self._released.append(self._taken(name))
        self.wakes_s = self._at_s
        self.advance()

    def drain_released(self) -> list[Completion]:
        found, self._released = self._released, []
        return found

    def completed(self, first: int) -> list[Completion]:
        return self._finished[first:]

    def lengths(self) -> list[tuple[str, int]]:
        return [(name, self._requests[name].noise_key - left) for name, left in self._left.items()]

    def progress(self) -> Progress:
        self.advance()
        return Progress(
            beats=round(1e3 * self._pool.now_s),
            num_finished=len(self._finished),
            num_generated=self._num_written,
            num_running=min(len(self._left), self._pool.max_running),
        )
