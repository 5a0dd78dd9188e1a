"""The learner: packed rollouts in, new policy weights out.

It owns the training copy of the policy, its optimizer and its version. It does not know where
rollouts come from, who reads its weights, or where a checkpoint lies.

    step([batch, ...]):   old logprobs ---> for each mini-batch: [micro-batches: forward, backward]
                          (a pass of its own      `-> optimizer update            version + 1
                          if several updates)

In a team every member is given the same batches, computes its share of the micro-batches, and makes
the update of the whole batch: gradients are summed, so that weights stay the same bits everywhere.
With `sharding = "full"` each member updates its shard (`rl.sharded.py`), and a step ends by
gathering the whole policy. Recovery from a lost member is described in `rl.recovery`.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.errors import CheckpointError, ClusterError, ConfigError, NonFiniteError, TeamError
from longtail.model.transformer import Transformer
from longtail.rl import recovery
from longtail.rl.collectives import ALONE, Team, spread, sum_gradients
from longtail.rl.learner_metrics import LearnerMetrics, LearnerReport
from longtail.rl.logprobs import MAX_LOGITS, TokenScores, score
from longtail.rl.loss import LOSSES, LossInputs, LossOutput, LossSettings
from longtail.rl.optim import Optimizer, OptimizerSettings
from longtail.rl.packing import lay_out, moved
from longtail.types import MicroBatch, PackedSequences, PolicyWeights, SamplingParams, TrainBatch

if TYPE_CHECKING:
    from longtail.rl.sharded import Shards

_NOTHING = lay_out([(0, 0)], prompt_lens=[1])
"""What a member passes over that has no micro-batch left while others need its shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSettings:
    """How a learner updates; None takes the constant of the loss's own paper.

    Example: LearnerSettings(loss="dapo", optimizer=OptimizerSettings(learning_rate=1e-5))
    """

    loss: str = "grpo"
    """A key of `rl.loss.LOSSES`."""
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip_low: float | None = None
    clip_high: float | None = None
    kl_coef: float = 0.0
    """Above 0, a frozen copy of the weights at construction is kept as the reference."""
    tis_cap: float | None = None
    recompute: bool = False
    """Gradient checkpointing of the decoder's layers."""
    autocast: bool = False
    """bfloat16 matrix products over float32 weights."""
    max_logits: int = MAX_LOGITS
    sharding: Literal["none", "full"] = "none"
    """`full`: members of a team hold a shard each of weights, gradients and moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What a resumed learner needs beside the weights: tensors (safetensors) and numbers (JSON)."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, int]


@final
class Learner:
    """Owns the policy's training copy; the model given becomes the learner's, and is not packed.

    Lifecycle: construct with the *initial* weights (they are the KL reference), `restore` if the
    run goes on from a checkpoint, then `step` and `weights` in turn. An update whose loss or
    gradient is not finite is not made and raises NonFiniteError, on all members of the team;
    earlier updates of the same step, if it has several, stand. A step that loses its team raises
    TeamError and changes nothing: `join` another team, and make the step again unless the version
    shows that another member has made it. A sharded learner cannot join another team.
    """

    def __init__(self, model: Transformer, settings: LearnerSettings) -> None:
        if settings.loss not in LOSSES:
            raise ConfigError(
                f"learner.loss = {settings.loss!r}: it must be one of {', '.join(LOSSES)}"
            )
        if settings.autocast and model.dtype != torch.float32:
            raise ConfigError(
                f"learner.autocast = true with {model.dtype} weights: it needs float32"
            )
        self._model = self._trained = model.requires_grad_(True)
        self._settings = settings
        self._team: Team = ALONE
        self._shards: Shards | None = None
        self._spec = LOSSES[settings.loss]
        self._optimizer = Optimizer(model.named_parameters(), settings.optimizer)
        self._reference = (
            copy.deepcopy(model).requires_grad_(False) if settings.kl_coef > 0 else None
        )
        for each in (self._model, self._reference):
            if each is not None:
                each.fuse()
        self._version = 0

    @property
    def version(self) -> int:
        """Steps done, which is the version of the present weights."""
        return self._version

    def step(
        self,
        batches: Sequence[TrainBatch],
        on_progress: Callable[[bool], None] = lambda is_waiting: None,
    ) -> LearnerReport:
        """Make one optimizer update for each mini-batch that generated a token.

        Logprobs of the old policy come from a pass of their own only where there are several
        updates; before the first, the current logprobs are the old ones. `on_progress` is called
        after every micro-batch, and with True when this member has to wait for the others.
        """
        batches = [batch for batch in batches if batch.num_generated]
        for batch in batches:
            _refuse_greedy(batch.sampling)
        can_undo = self._team.size > 1 < len(batches) and self._shards is None
        undo = (self.state(), self.weights()) if can_undo else None
        tally = LearnerMetrics()
        try:
            self._updates(batches, tally, on_progress)
        except TeamError:
            if undo is not None:
                self.restore(undo[0], undo[1].tensors)
            raise
        self._version += 1
        return tally.report(self._version, batches)

    def _updates(
        self,
        batches: Sequence[TrainBatch],
        tally: LearnerMetrics,
        on_progress: Callable[[bool], None],
    ) -> None:
        several = len(batches) > 1
        old = [
            self._old_logprobs(batch, tally, on_progress) if several else None for batch in batches
        ]
        try:
            for index, batch in enumerate(batches):
                self._gradient(batch, old[index], tally, on_progress)
                if index == len(batches) - 1:
                    # NOTE: before the last update, so that a member that loses the team here has
                    # not made a step that others lack.
                    tally.pool(self._team)
                start = self._now()
                update = self._optimizer.update(self._version)
                tally.update_seconds += self._now() - start
                tally.grad_norms.append(update.grad_norm)
                tally.learning_rate = update.learning_rate
            if self._shards is not None:
                self._shards.gather()
        finally:
            self._optimizer.discard()  # what a failure left behind

    def _deal(self, batch: TrainBatch) -> list[tuple[int, ...]]:
        """Which micro-batches are whose."""
        return spread([one.packed.num_tokens for one in batch.micro_batches], self._team.size)

    def _old_logprobs(
        self, batch: TrainBatch, tally: LearnerMetrics, on_progress: Callable[[bool], None]
    ) -> dict[int, Tensor]:
        """Score this member's micro-batches under the policy before this step's first update."""
        start, dealt = self._now(), self._deal(batch)
        logprobs: dict[int, Tensor] = {}
        with torch.no_grad():
            for index in dealt[self._team.rank]:
                packed = batch.micro_batches[index].packed
                logprobs[index] = self._score(packed, batch.sampling).logprobs
                on_progress(False)
            for _ in range(self._spare_passes(dealt)):
                self._score(_NOTHING, batch.sampling)
        tally.logprob_seconds += self._now() - start
        return logprobs

    def _gradient(
        self,
        batch: TrainBatch,
        old: dict[int, Tensor] | None,
        tally: LearnerMetrics,
        on_progress: Callable[[bool], None],
    ) -> None:
        """Accumulate the gradient of this member's share, then of everyone's."""
        dealt = self._deal(batch)
        share = dealt[self._team.rank]
        failure: NonFiniteError | None = None
        for index in share:
            start = self._now()
            before = None if old is None else old[index]
            output = self._loss(batch, batch.micro_batches[index], before, tally)
            failure = failure or self._non_finite(output.loss, index)
            forwarded = self._now()
            torch.autograd.backward(output.loss)
            tally.logprob_seconds += forwarded - start
            tally.update_seconds += self._now() - forwarded
            on_progress(False)
        for _ in range(self._spare_passes(dealt)):
            logprobs = self._score(_NOTHING, batch.sampling).logprobs
            self._of_reference(_NOTHING, batch.sampling)
            torch.autograd.backward(0.0 * logprobs.sum())
        on_progress(True)
        start = self._now()
        computed, void = bool(share), failure is not None
        if self._shards is None:
            void_at = sum_gradients(self._team, self._model, computed=computed, void=void)
        else:
            void_at = self._shards.sum_gradients(computed=computed, void=void)
        tally.update_seconds += self._now() - start
        if failure is not None:
            raise failure
        if void_at:
            raise NonFiniteError(
                f"step {self._version}: the loss is not finite on members {void_at} of the team; "
                "no update was made"
            )

    def _spare_passes(self, dealt: Sequence[Sequence[int]]) -> int:
        """Return the number of passes made only because other members have micro-batches left."""
        if self._shards is None:
            return 0
        return max(map(len, dealt)) - len(dealt[self._team.rank])

    def _loss(
        self, batch: TrainBatch, micro_batch: MicroBatch, old: Tensor | None, tally: LearnerMetrics
    ) -> LossOutput:
        """Run the policy, and the reference if there is one, over a micro-batch."""
        scores = self._score(micro_batch.packed, batch.sampling)
        rows, logprobs = scores.rows, scores.logprobs
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old,
            rollout_logprobs=micro_batch.rollout_logprobs.to(logprobs)[rows],
            reference_logprobs=self._of_reference(micro_batch.packed, batch.sampling),
            advantages=micro_batch.advantages.to(logprobs)[rows],
            sequence=micro_batch.packed.sequence.to(rows.device)[rows],
            num_here=micro_batch.packed.num_sequences,
            num_sequences=batch.num_sequences,
            num_generated=batch.num_generated,
        )
        output = self._spec.function(inputs, self._loss_settings(batch.sampling.max_tokens))
        tally.add(inputs, output, scores)
        return output

    def _of_reference(self, packed: PackedSequences, sampling: SamplingParams) -> Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._score(packed, sampling, self._reference).logprobs

    def _loss_settings(self, max_tokens: int) -> LossSettings:
        own, spec = self._settings, self._spec
        return LossSettings(
            clip_low=spec.clip_low if own.clip_low is None else own.clip_low,
            clip_high=spec.clip_high if own.clip_high is None else own.clip_high,
            max_tokens=max_tokens,
            kl_coef=own.kl_coef,
            tis_cap=own.tis_cap,
        )

    def _score(
        self, packed: PackedSequences, sampling: SamplingParams, model: Transformer | None = None
    ) -> TokenScores:
        """Score on the model's device, under autocast if that is set."""
        model = self._trained if model is None else model
        device = model.device
        here = moved(packed, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._settings.autocast):
            return score(
                model,
                here,
                sampling,
                recompute=self._settings.recompute,
                max_logits=self._settings.max_logits,
            )

    def _non_finite(self, loss: Float[Tensor, ""], micro_batch: int) -> NonFiniteError | None:
        """Return the refusal of a loss, naming the broken weights if it is they."""
        if loss.isfinite():
            return None
        broken = (n for n, p in self._model.named_parameters() if not p.isfinite().all())
        culprit = next(broken, f"the loss (micro-batch {micro_batch})")
        return NonFiniteError(f"step {self._version}: {culprit} is not finite; no update was made")

    def _now(self) -> float:
        """Read the clock once the device has done what was asked of it."""
        if self._trained.device.type == "cuda":
            torch.cuda.synchronize(self._trained.device)
        return time.perf_counter()

    def weights(self) -> PolicyWeights:
        """Copy the present policy; a tied head appears once, as the embedding."""
        return PolicyWeights(
            version=self._version,
            tensors={n: p.detach().clone() for n, p in self._model.named_parameters()},
        )

    def digest(self) -> str:
        """Return the SHA-256 of the present weights: their names, shapes and bytes."""
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
            digest.update(parameter.detach().cpu().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def join(self, team: Team) -> int:
        """Learn with another team from now on, from its newest version; return that version.

        Raises TeamError if a member is lost meanwhile, ClusterError if the policy is lost.
        """
        if self._shards is not None:
            raise ClusterError(
                "the team that held the policy in shards is lost (learner.sharding); start again: "
                "the run resumes from its newest checkpoint"
            )
        versions = recovery.versions(team, self._version)
        self._team, newest = team, max(versions)
        if self._version < newest:
            self._version = recovery.INCOMPLETE  # until all tensors have come
        recovery.synchronize(team, versions, self._model, self._optimizer)
        self._version = newest
        if self._settings.sharding == "full" and team.size > 1:
            from longtail.rl.sharded import Shards  # importing FSDP2 takes most of a second

            optimizer, moments = self._settings.optimizer, self._optimizer.tensors()
            shards = Shards(team, self._model, optimizer, moments, self._reference)
            self._shards, self._trained, self._optimizer = shards, shards.model, shards.optimizer
        return self._version

    def state(self) -> LearnerState:
        """Copy what the next step depends on beside the weights; sharded, this member's rows."""
        return LearnerState(tensors=self._optimizer.tensors(), numbers={"version": self._version})

    def restore(self, state: LearnerState, weights: Mapping[str, Tensor]) -> None:
        """Go on exactly where `state` and the weights saved with it were taken.

        Raises CheckpointError if it is of another model.
        """
        assert self._shards is None, "restored before it is sharded"
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"weights of another model: {name} is missing or misshapen")
        self._optimizer.load(state.tensors)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        self._version = state.numbers["version"]


def _refuse_greedy(sampling: SamplingParams) -> None:
    if sampling.temperature == 0.0:
        raise ConfigError(
            "rollout.temperature = 0: a greedy policy has no gradient; use a temperature above 0 "
            "(1.0 samples the model's own distribution)"
        )
