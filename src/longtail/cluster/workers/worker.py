"""A worker: an engine, a learner and a drafter trainer on one processor, one of them at a time.

    task        generate, learn, publish, train_drafter, adopt, ...   one after another, one thread
    message     stop, completed, sequences, add_sequences, ...        at any time, another thread

A worker knows neither the other workers nor its callers. The arguments of a message take effect
between two engine steps or two micro-steps of training, and answers are copies, so no message waits
for a task.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import final

from torch import Tensor

from longtail.cluster.records import PolicyState, Progress, ShardResult
from longtail.cluster.workers.components import WorkerComponents
from longtail.drafter.training.buffer import SequenceSnapshot
from longtail.drafter.training.replica_gain import SpotReport
from longtail.drafter.weights import DrafterWeights
from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.engine.text import AcceptedSpans
from longtail.errors import NonFiniteError
from longtail.generator import StepReport
from longtail.rl.collectives import SINGLE_PROCESS, TorchProcessGroup
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.speculation.drafter import Statistics, Sums
from longtail.system.device import compute_threads
from longtail.types import Completion, MicroBatch, Request, SamplingParams, TrainBatch

_MOST_TEXT = 1000
"""Most characters of a text that progress carries."""


class Stopped(Exception):  # noqa: N818 - not an error: `Worker.stop` asks for it
    """The task was stopped before it was done."""


@final
class Worker:
    """Owns its components. Tasks are called by one thread, messages by any other."""

    def __init__(self, components: WorkerComponents) -> None:
        self._components = components
        self._served = None if components.drafting is None else components.drafting.served
        self._stop = Event()
        self._new_sequences = deque[SequenceSnapshot]()
        self._finished: list[Completion] = []
        """Completions of the shard that is being generated."""
        self._progress = Progress()
        self._beats = 0
        self.on_step: Callable[[Progress], None] | None = None
        """Called after every engine step if the worker shares its caller's process; may raise."""

    def close(self) -> None:
        """End what it started; the end of its process does so, too."""
        self._components.generator.close()

    # ---- tasks

    def ready(self) -> None:
        """Return once the worker is there."""

    def generate(self, requests: Sequence[Request], learns: bool = False) -> ShardResult:
        """Generate all completions. Raises Stopped; then they are aborted.

        `learns`: the result has the sums over these completions, if the drafter learns from sums.
        """
        generator, report, series = self._components.generator, RolloutReport(), RolloutSeries()
        accepted, statistics = AcceptedSpans(), self._statistics_of(learns)
        names, self._finished = {each.request_id for each in requests}, []
        self._progress = Progress(beats=self._beats)

        def on_step(step: StepReport) -> None:
            report.add(step)
            series.add(step)
            accepted.add(step)
            step.raise_failure(names)
            self._on_step(step)

        try:
            with compute_threads(self._components.rollout_threads):
                generator.generate(requests, on_step)
        except BaseException:
            if statistics is not None:
                statistics.take()  # the next rollout begins with none
            raise
        finally:  # later messages are about another rollout
            completions, self._finished = self._finished, []
            for name, _, _ in generator.unfinished():
                generator.abort(name)
        return ShardResult(
            completions=tuple(completions),
            report=report,
            series=series if series.seconds else None,
            drafted=accepted.characters(completions, self._components.tokenizer.decode),
            sums=None if statistics is None else statistics.take(),
        )

    def accumulate(self, micro_batch: MicroBatch, sampling: SamplingParams) -> None:
        """Add the gradient of a micro-batch to the sums of the next learner step."""
        self._components.generator.sleep()
        self._components.learner.accumulate(micro_batch, sampling)
        self._beats += 1

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step, together with its process group."""

        def on_progress(is_waiting: bool) -> None:
            self._beats += 1
            self._progress = Progress(beats=self._beats, is_waiting=is_waiting)

        self._components.generator.sleep()
        try:
            return self._components.learner.step(batches, on_progress)
        finally:
            self._progress = Progress(beats=self._beats)

    def publish(self) -> int:
        """Hand the learner's weights to the engine; return their version.

        Raises NonFiniteError with the name of the tensor if an update broke the weights, so that
        they neither generate nor reach a checkpoint.
        """
        learner = self._components.learner
        self._components.generator.load_policy(learner.version, learner.published())
        return learner.version

    def join(self, rank: int, size: int, address: str, timeout_s: float) -> int:
        """Join a process group of learners; return the newest version in it, now this one's."""
        if size == 1:
            return self._components.learner.join(SINGLE_PROCESS)
        backend = self._components.backend
        group = TorchProcessGroup(rank, size, address, backend=backend, timeout_s=timeout_s)
        return self._components.learner.join(group)

    def policy_digest(self) -> str:
        """Return the SHA-256 of the learner's weights."""
        return self._components.learner.digest()

    def learner_state(self) -> LearnerState:
        """Copy the state of the learner without the weights; sharded, this worker's rows."""
        return self._components.learner.state()

    def continue_run(self, state: PolicyState, drafter: DrafterWeights | None) -> None:
        """Restore a policy, publish it, and adopt a drafter, in a new process of a run.

        The weights at construction stay the KL reference.
        """
        self._components.learner.restore(state.learner, state.weights)
        self.publish()
        if drafter is not None:
            self.adopt(drafter)

    def restore_saved(self, directory: Path, learner: LearnerState) -> None:
        """Continue from weights on disk. Raises CheckpointError if they are of another model."""
        self._components.learner.restore(learner, self._components.policy.read(directory))

    def save_policy(self, path: Path) -> None:
        """Write weights, generation config and tokenizer as a Hugging Face directory."""
        tokenizer = self._components.tokenizer
        self._components.policy.save(path, tokenizer.eos_ids, tokenizer.bos_id)
        tokenizer.save(path)

    # ---- tasks of the drafter

    def drafter(self) -> tuple[DrafterWeights, Sums | None] | None:
        """Return the drafter that learns and is served, with its first sums if it learns so."""
        drafting = self._components.drafting
        if drafting is None or self._served is None:
            return None
        return self._served, drafting.sums

    def solve_drafter(self, sums: Sums, part: int, num_parts: int) -> Mapping[str, Tensor] | str:
        """Return a part of the drafter that follows from sums, or why none does.

        It is solved on one thread: bits are equal.
        """
        with compute_threads(1):
            try:
                return sums.weights(self._components.tokenizer.eos_ids, part, num_parts)
            except NonFiniteError as error:
                return str(error)

    def save_drafter(self, path: Path) -> None:
        """Write the configured drafter, or one that the generator learns by itself."""
        if self._components.drafting is None:
            self._components.generator.save_drafter(path)
        elif self._components.drafter is not None:
            self._components.drafter.save(path)

    def train_drafter(self, published: DrafterWeights, limit_s: float = math.inf) -> SpotReport:
        """Train the drafter until it is stopped or `limit_s` have passed."""
        drafting = self._components.drafting
        assert drafting is not None, "a drafter learns"
        assert drafting.trainer is not None, "by gradient"
        drafting.buffer.add(self._arrived())
        drafting.trainer.begin(published)
        began = time.perf_counter()

        def should_stop() -> bool:
            self._beats += 1
            self._progress = Progress(beats=self._beats)
            drafting.buffer.add(self._arrived())
            return self._stop.is_set() or time.perf_counter() - began > limit_s

        return drafting.trainer.train(drafting.buffer, should_stop)

    def adopt(self, weights: DrafterWeights) -> int:
        """Draft with other weights; return their version."""
        self._components.generator.load_drafter(weights.tensors)
        self._served = weights
        return weights.version

    # ---- messages

    def stop(self) -> None:
        """Stop the present task within one step, and later ones until `clear_stop`."""
        self._stop.set()

    def clear_stop(self) -> None:
        """Withdraw all earlier calls of `stop`."""
        self._stop.clear()

    def progress(self) -> Progress:
        """Return the progress of the present task."""
        return self._progress

    def policy_state(self) -> PolicyState:
        """Copy the policy; not to be called while it is learned."""
        learner = self._components.learner
        return PolicyState(weights=learner.learned(), learner=learner.state())

    def sequences(self, step: int) -> list[SequenceSnapshot]:
        """Copy the unfinished sequences of the present shard."""
        return [
            SequenceSnapshot(request_id=name, tokens=tokens, prompt_len=prompt_len, step=step)
            for name, tokens, prompt_len in self._components.generator.unfinished()
        ]

    def completed(self, first: int) -> list[Completion]:
        """Copy the completions of the present shard from `first` on, in order of their ends."""
        return list(self._finished)[first:]

    def add_sequences(self, sequences: Sequence[SequenceSnapshot]) -> None:
        """Add sequences to train the drafter on."""
        self._new_sequences.extend(sequences)

    # ---- between two steps

    def _on_step(self, step: StepReport) -> None:
        self._beats += 1
        finished, before = self._finished, self._progress
        finished.extend(step.finished)
        self._progress = Progress(
            beats=self._beats,
            num_finished=len(finished),
            num_generated=before.num_generated + len(step.emitted),
            num_running=step.num_running,
            drafts=bool(step.verified) if step.speculates else None,
            text=before.text or (finished[0].text[:_MOST_TEXT] if finished else ""),
        )
        if self.on_step is not None:
            self.on_step(self._progress)
        if self._stop.is_set():
            raise Stopped

    def _statistics_of(self, learns: bool) -> Statistics | None:
        """Return the empty sums of a rollout; None if nothing learns from them."""
        drafting = self._components.drafting
        if drafting is None or drafting.statistics is None:
            return None
        drafting.statistics.is_on = learns
        return drafting.statistics if learns else None

    def _arrived(self) -> Iterator[SequenceSnapshot]:
        """Yield the sequences that were added since the last call; more may come meanwhile."""
        while self._new_sequences:
            yield self._new_sequences.popleft()
