"""The learner: packed rollouts in, new policy weights out.

It owns the training copy of the policy, its optimizer and its version. Rollouts, checkpoints and
readers of the weights are unknown here.

    accumulate(micro-batch):  score, loss, backward, before the rest of its batch is known
    step([batch, ...]):   old logprobs ---> for each mini-batch: [other micro-batches: score, loss,
                          (only if there are several updates)     backward], reduce, update

In a process group every rank is given the same batches, computes its part of the micro-batches, and
makes the update of the whole batch. Gradients are summed as whole numbers
(`rl.gradient_accumulators`), so weights have the same bits on all ranks, for any number of them and
order of micro-batches. With `sharding = "full"` each rank updates its shard, from floating-point
sums (`rl.sharded`), and a step ends by gathering the whole policy.

A step that loses a rank leaves weights, moments and version of the others as they were. Ranks that
have nevertheless made it are one version ahead; in the next group the ranks behind, and those that
are new, receive weights and moments from one of them.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn

from longtail.config.rl import LearnerSection
from longtail.errors import ClusterError, ConfigError, ProcessGroupError
from longtail.model.hf.model import PolicyTransformer
from longtail.model.kernels.training_products import can_hold_casts
from longtail.model.policy import Policy, Scorer
from longtail.rl.collectives import SINGLE_PROCESS, ProcessGroup, balance
from longtail.rl.configured_loss import loss_of, settings_of
from longtail.rl.gradient_accumulators import GradientAccumulators
from longtail.rl.learner_metrics import LearnerMetrics, LearnerReport, MetricsRow
from longtail.rl.logprobs import TokenScores, score
from longtail.rl.loss import LossInputs
from longtail.rl.optim import Optimizer, load_parameters
from longtail.rl.packing import lay_out
from longtail.system.huge_pages import release_freed_memory, reuse_freed_memory
from longtail.types import MicroBatch, PackedSequences, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from longtail.rl.sharded import Shards

OnProgress = Callable[[bool], None]
"""Called after every micro-batch, and with True when this rank begins to wait for the others."""

_EMPTY = lay_out([(0, 0)], prompt_lens=[1])
"""Input of passes that a rank makes only because others need its shard."""
_INCOMPLETE = -1
"""Version of a learner whose synchronization was interrupted: its weights are a mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """State of a learner beside its weights: tensors (safetensors) and numbers (JSON)."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, int]


@final
class Learner:
    """Owns the policy's training copy; the model given becomes the learner's, and is not packed.

    Lifecycle: construct with the *initial* weights (they are the KL reference), `restore` if the
    run continues from a checkpoint, then `step` and `weights` in turn, with any calls of
    `accumulate` before a step. An update whose loss or gradient is not finite is not made and
    raises NonFiniteError on all ranks; earlier updates of the same step stand. A step that loses
    its process group raises ProcessGroupError and changes nothing: `join` another group, and repeat
    the step unless the version shows that another rank has made it. A sharded learner cannot join
    another group.
    """

    def __init__(self, model: Policy, settings: LearnerSection, *, total_steps: int = 0) -> None:
        self._model = self._trained = model
        self._parameters = model.trainable()
        model.fuse()
        self._settings, self._total_steps = settings, total_steps
        self._group: ProcessGroup = SINGLE_PROCESS
        self._shards: Shards | None = None
        self._spec, self._loss_settings = loss_of(settings), settings_of(settings)
        self._optimizer = Optimizer(self._parameters.items(), settings, total_steps=total_steps)
        self._reference = model.reference() if settings.kl_coef > 0 else None
        self.version = 0
        """Number of steps made, which is the version of the present weights."""
        self._accumulators = GradientAccumulators(self._parameters, exact=settings.sums != "float")
        for module in model.modules():
            if isinstance(module, nn.Embedding):  # only rows of its tokens are accumulated
                module.sparse = settings.sharding != "full" and model.device.type == "cpu"
        self._holds_casts = False
        reuse_freed_memory()
        self._metrics = LearnerMetrics()
        """Metrics of the next step, with the seconds of what was accumulated."""

    def accumulate(self, micro_batch: MicroBatch, sampling: SamplingParams) -> None:
        """Accumulate the gradient of a micro-batch for the next step, which then leaves it out.

        The next step must make a single update, of a batch with this micro-batch. A loss that is
        not finite raises NonFiniteError and adds nothing. What was added is not added again.
        """
        if self._shards is not None:
            raise ClusterError(
                "learner.sharding = 'full': shards learn from a micro-batch together, in a step"
            )
        _refuse_greedy(sampling)
        name, rows = micro_batch.name, self._accumulators.rows
        if name not in rows:
            self._hold_casts()
            self._learn(micro_batch, sampling)
            if not math.isfinite(rows[name].loss):
                self._accumulators.refuse(self.version, {name: rows.pop(name)})

    def forget(self) -> None:
        """Drop what was accumulated; the next step computes it again."""
        self._metrics = LearnerMetrics()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Free the accumulators, and the weights converted for autocast."""
        self._accumulators.clear()
        self._model.hold_casts(None)
        self._holds_casts = False
        release_freed_memory()

    def step(
        self, batches: Sequence[TrainBatch], on_progress: OnProgress = lambda is_waiting: None
    ) -> LearnerReport:
        """Make one optimizer update for each mini-batch that has a generated token.

        Old log-probabilities need a pass of their own only if there are several updates; before the
        first update, the current ones are the old ones.
        """
        batches = [batch for batch in batches if batch.num_generated]
        for batch in batches:
            _refuse_greedy(batch.sampling)
        several = len(batches) > 1
        # A single update happens after the last reduction, so it needs no undo.
        can_undo = several and self._group.size > 1 and self._shards is None
        before = (self.state(), self.learned()) if can_undo else None
        try:
            with self._group.guarded():
                held = self._held(batches)
                self._hold_casts()
                old = [self._old(batch, on_progress) for batch in batches if several]
                for index, batch in enumerate(batches):
                    self._hold_casts()
                    self._backward(batch, held, old[index] if old else {}, on_progress)
                    on_progress(True)
                    self._reduce(batch)
                    self._update()
                if self._shards is not None:
                    self._shards.gather()
            self.version += 1
            return self._metrics.report(self.version, batches)
        except ProcessGroupError:
            if before is not None:
                self.restore(*before)
            raise
        finally:
            self._optimizer.discard()  # gradients left by a failure
            self.forget()

    def _held(self, batches: Sequence[TrainBatch]) -> set[str]:
        """Return the micro-batches that some rank has accumulated; none for several updates."""
        if self._shards is not None:
            return set()
        only = batches[0].micro_batches if len(batches) == 1 else ()
        return self._accumulators.agree(self._group, [one.name for one in only])

    def _hold_casts(self) -> None:
        """Convert the weights for autocast, once until the next update; shards are gathered."""
        is_whole = self._shards is None and can_hold_casts(self._model.device)
        if self._settings.autocast is True and is_whole and not self._holds_casts:
            self._model.hold_casts(torch.bfloat16)
            self._holds_casts = True

    def _assigned(
        self, batch: TrainBatch, held: Collection[str] = ()
    ) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches, and its number of extra passes for others' sake."""
        rest = [one for one in batch.micro_batches if one.name not in held]
        assigned = balance([one.packed.num_tokens for one in rest], self._group.size)
        own = [rest[i] for i in assigned[self._group.rank]]
        return own, 0 if self._shards is None else max(map(len, assigned)) - len(own)

    def _old(self, batch: TrainBatch, on_progress: OnProgress) -> dict[str, Tensor]:
        """Score this rank's micro-batches under the policy before this step's first update."""
        own, extra = self._assigned(batch)
        logprobs: dict[str, Tensor] = {}
        with torch.no_grad(), self._metrics.timed("logprob", self._trained.device):
            for one in own:
                logprobs[one.name] = self._score(one.packed, batch.sampling).logprobs
                on_progress(False)
            for _ in range(extra):
                self._score(_EMPTY, batch.sampling)
        return logprobs

    def _backward(
        self,
        batch: TrainBatch,
        held: Collection[str],
        old: Mapping[str, Tensor],
        on_progress: OnProgress,
    ) -> None:
        """Add the gradients of this rank's micro-batches, except for those that are `held`."""
        own, extra = self._assigned(batch, held)
        for one in own:
            self._learn(one, batch.sampling, old.get(one.name))
            on_progress(False)
        for _ in range(extra):
            logprobs = self._score(_EMPTY, batch.sampling).logprobs
            self._reference_logprobs(_EMPTY, batch.sampling)
            torch.autograd.backward(0.0 * logprobs.sum())
        if self._shards is not None:
            self._shards.reduce_gradients(1.0 / self._spec.normaliser(batch))

    def _learn(
        self, micro_batch: MicroBatch, sampling: SamplingParams, old: Tensor | None = None
    ) -> None:
        """Add the gradient of a micro-batch, unless its loss is not finite, and its metrics."""
        with self._metrics.timed("logprob", self._trained.device):
            scores = self._score(micro_batch.packed, sampling)
            rows, logprobs = scores.rows, scores.logprobs
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                rollout_logprobs=micro_batch.rollout_logprobs.to(logprobs)[rows],
                reference_logprobs=self._reference_logprobs(micro_batch.packed, sampling),
                advantages=micro_batch.advantages.to(logprobs)[rows],
                sequence=micro_batch.packed.sequence.to(rows.device)[rows],
                num_here=micro_batch.packed.num_sequences,
            )
            output = self._spec.function(inputs, self._loss_settings)
            loss, row = output.loss, MetricsRow.of(inputs, output, scores)
        with self._metrics.timed("backward", self._trained.device):
            if self._shards is None and math.isfinite(row.loss):
                self._accumulators.add(micro_batch.name, loss, row)
                return
            self._accumulators.rows[micro_batch.name] = row
            if self._shards is not None:
                torch.autograd.backward(loss)

    def _reduce(self, batch: TrainBatch) -> None:
        """Sum the gradients of all ranks; NonFiniteError if a number of any is not finite."""
        names, normaliser = [one.name for one in batch.micro_batches], self._spec.normaliser(batch)
        metrics = self._metrics
        with metrics.timed("update", self._trained.device):
            rows = metrics.gather(self._group, names, self._accumulators.rows)
            self._accumulators.refuse(self.version, dict(zip(names, rows, strict=True)))
            if self._shards is None:
                # NOTE: the last message before the update, so that a rank that loses the group
                # has not made a step that other ranks lack.
                self._accumulators.reduce(self._group)
                self._accumulators.settle(1.0 / normaliser)
        metrics.add(rows, normaliser)

    def _update(self) -> None:
        with self._metrics.timed("update", self._trained.device):
            update = self._optimizer.update(self.version)
        self._drop_gradients()  # of the weights before
        self._metrics.grad_norms.append(update.grad_norm)
        self._metrics.learning_rate = update.learning_rate

    def _reference_logprobs(
        self, packed: PackedSequences, sampling: SamplingParams
    ) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._score(packed, sampling, self._reference).logprobs

    def _score(
        self, packed: PackedSequences, sampling: SamplingParams, model: Scorer | None = None
    ) -> TokenScores:
        own = self._settings
        return score(
            self._trained if model is None else model,
            packed,
            sampling,
            autocast=own.autocast is True,
            recompute=own.gradient_checkpointing,
        )

    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the present policy itself by Hugging Face's names, for a reader that copies it."""
        return self._model.published()

    def learned(self) -> dict[str, Tensor]:
        """Copy the parameters that are learned, by the model's own names, as `restore` takes."""
        return {name: each.detach().clone() for name, each in self._parameters.items()}

    def digest(self) -> str:
        """Return the SHA-256 of the learned weights: their names, shapes and bytes."""
        digest = hashlib.sha256()
        for name, parameter in self._parameters.items():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def join(self, group: ProcessGroup) -> int:
        """Continue in another process group, from its newest version; return that version.

        Raises ProcessGroupError if a rank is lost meanwhile, ClusterError if the policy is lost.
        """
        if self._shards is not None:
            raise ClusterError(
                "the process group that held the policy in shards is lost (learner.sharding); "
                "start again: the run resumes from its newest checkpoint"
            )
        versions = [int(each) for each in group.gather([self.version])[:, 0].tolist()]
        newest = max(versions)
        if newest == _INCOMPLETE:
            raise ClusterError("the policy is lost; start again from the newest checkpoint")
        self._group = group
        if self.version < newest:
            self.forget()  # gradients of other weights
            self.version = _INCOMPLETE  # until all tensors have come
        if min(versions) < newest:
            source = versions.index(newest)
            group.broadcast(source, list(self._parameters.values()))
            self._optimizer.broadcast_moments(group, source)
        self.version = newest
        if self._settings.sharding == "full" and group.size > 1:
            from longtail.rl.sharded import Shards  # importing FSDP2 takes most of a second

            model, reference = self._model, self._reference
            assert isinstance(model, PolicyTransformer), "checked when the model is opened"
            assert reference is None or isinstance(reference, PolicyTransformer)
            shards = Shards(
                group,
                model,
                self._settings,
                self._optimizer.tensors(),
                reference,
                total_steps=self._total_steps,
            )
            self._shards, self._trained, self._optimizer = shards, shards.model, shards.optimizer
        return self.version

    def state(self) -> LearnerState:
        """Copy the state of the next step beside the weights; sharded, this rank's rows of it."""
        return LearnerState(tensors=self._optimizer.tensors(), numbers={"version": self.version})

    def restore(self, state: LearnerState, weights: Mapping[str, Tensor]) -> None:
        """Continue where `state` and the weights of `learned` were taken.

        Raises CheckpointError if they are another model's.
        """
        assert self._shards is None, "restored before it is sharded"
        self.forget()
        self._optimizer.load(state.tensors)
        load_parameters(self._parameters, weights)
        self.version = state.numbers["version"]


def _refuse_greedy(sampling: SamplingParams) -> None:
    if sampling.temperature == 0.0:
        raise ConfigError(
            "rollout.temperature = 0: a greedy policy has no gradient; use a temperature above 0 "
            "(1.0 samples the model's own distribution)"
        )
