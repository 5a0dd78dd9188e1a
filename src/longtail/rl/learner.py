"""The learner: packed rollouts in, new policy weights out.

It owns the training copy of the policy, its optimizer and its version. It does not know where
rollouts come from, who reads its weights, or where a checkpoint lies.

    step([batch, ...]):   old logprobs ---> for each mini-batch: [micro-batches: forward, backward]
                          (a pass of its own      `-> optimizer update            version + 1
                          if several updates)

In a team every member is given the same batches, computes its share of the micro-batches, and makes
the update of the whole batch: gradients are summed, so that weights stay the same bits everywhere.
Where members keep a share of the optimizer's moments each (`rl.shares.py`), or shards of
everything (`rl.sharded.py`), they update what they keep, and `gather` fetches the rest.
"""

import copy
import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.errors import CheckpointError, ClusterError, ConfigError, NonFiniteError, TeamError
from longtail.model.transformer import Transformer
from longtail.rl.collectives import ALONE, Team, spread, tell
from longtail.rl.learner_metrics import LearnerMetrics, LearnerReport
from longtail.rl.logprobs import MAX_LOGITS, TokenScores, score
from longtail.rl.loss import LOSSES, LossInputs, LossOutput, LossSettings
from longtail.rl.optim import Optimizer, OptimizerSettings
from longtail.rl.packing import lay_out, moved
from longtail.rl.shares import Doubt, Holding, Shares
from longtail.types import MicroBatch, PackedSequences, PolicyWeights, SamplingParams, TrainBatch

_NOTHING = lay_out([(0, 0)], prompt_lens=[1])
"""What a member passes over that has no micro-batch left while others need its shard."""
_NOWHERE = -1
"""The version of who was being given another and never got all of it."""


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
    moment_copies: int = 0
    """How many members of the team keep the moments of a parameter; 0 is all of them."""
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
    TeamError and changes nothing: `join` another team and make it again, unless the version tells
    that somebody had made it. After a step in a team, `gather`; if that raises TeamError, `join`.
    Sharded, it stays with its first team: to lose that is to lose the policy.
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
        self._doubt: Doubt | None = None
        self._spec = LOSSES[settings.loss]
        self._optimizer = Optimizer(model.named_parameters(), settings.optimizer)
        self._holding: Holding = Shares(ALONE, model, self._optimizer, copies=0)
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
        can_undo = self._team.size > 1 < len(batches) and self._holding.has_all_weights
        undo = (self.state(), self.weights()) if can_undo else None
        tally = LearnerMetrics()
        try:
            self._updates(batches, tally, on_progress)
        except TeamError:
            if undo is not None:
                if self._doubt is not None:
                    self._doubt = replace(
                        self._doubt,
                        moments=self._optimizer.tensors(),
                        weights=self.weights().tensors,
                    )
                self.restore(undo[0], undo[1].tensors, part=True)
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
                    # NOTE: before the last update, so that whoever loses the team here, too, has
                    # not made a step that others lack; if they did not, it may yet be told.
                    self._doubt = Doubt(gradients=[p.grad for p in self._model.parameters()])
                    tally.pool(self._team)
                    self._doubt = None
                start = self._now()
                update = self._optimizer.update(self._version)
                tally.update_seconds += self._now() - start
                tally.grad_norms.append(update.grad_norm)
                tally.learning_rate = update.learning_rate
                if index < len(batches) - 1 and self._holding.has_all_weights:
                    self.gather()
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
            for _ in range(self._holding.spare_passes(dealt)):
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
        for _ in range(self._holding.spare_passes(dealt)):
            logprobs = self._score(_NOTHING, batch.sampling).logprobs
            self._of_reference(_NOTHING, batch.sampling)
            torch.autograd.backward(0.0 * logprobs.sum())
        on_progress(True)
        start = self._now()
        void = self._holding.sum_gradients(computed=bool(share), void=failure is not None)
        tally.update_seconds += self._now() - start
        if failure is not None:
            raise failure
        if void:
            raise NonFiniteError(
                f"step {self._version}: the loss is not finite on members {void} of the team; "
                "no update was made"
            )

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
        """Step with another team from now on, from the newest version of any member; return it.

        Raises TeamError if the team is lost meanwhile, ClusterError if moments or shards have been.
        """
        if not self._holding.has_all_weights:
            raise ClusterError(
                "the team that held the policy in shards is lost (learner.sharding); start again: "
                "the run resumes from its newest checkpoint"
            )
        newest = int(max(tell(team, self._version)))
        if newest == _NOWHERE:
            raise ClusterError("the policy is lost; start again from the newest checkpoint")
        if self._doubt is not None and newest == self._version + 1:
            self._make_up(self._doubt)
        self._doubt = None
        self._team = team
        shares = Shares(team, self._model, self._optimizer, self._settings.moment_copies)
        self._holding = shares
        is_current = self._version == newest
        if not is_current:
            self._version = _NOWHERE  # until all has come: half of it is nothing to go on from
            self._optimizer.keep(())
        shares.level(is_current=is_current)
        self._version = newest
        if self._settings.sharding == "full" and team.size > 1:
            from longtail.rl.sharded import Shards  # FSDP2 takes most of a second

            optimizer, moments = self._settings.optimizer, self._optimizer.tensors()
            shards = Shards(team, self._model, optimizer, moments, self._reference)
            self._holding, self._trained, self._optimizer = shards, shards.model, shards.optimizer
        return newest

    def gather(self) -> None:
        """After a step, take the weights that others have updated; TeamError as from a step."""
        self._holding.gather()

    def _make_up(self, doubt: Doubt) -> None:
        """Make the update that others turn out to have made."""
        if doubt.moments is not None and doubt.weights is not None:
            state = LearnerState(tensors=doubt.moments, numbers={"version": self._version})
            self.restore(state, doubt.weights, part=True)
        for parameter, gradient in zip(self._model.parameters(), doubt.gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.update(self._version)
        self._version += 1

    def state(self, known: Collection[str] = ()) -> LearnerState:
        """Copy what the next step depends on beside the weights, tensors of known names left out.

        In a team whose members keep a share each, the whole is what all of them return together;
        a shard comes though its name is known, and its rows follow those of the member before.
        """
        return LearnerState(
            tensors=self._holding.tensors(known), numbers={"version": self._version}
        )

    def restore(
        self, state: LearnerState, weights: Mapping[str, Tensor], *, part: bool = False
    ) -> None:
        """Go on exactly where `state` and the weights saved with it were taken.

        `part`: it is the state of one member. Raises CheckpointError if it is of another model.
        """
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"weights of another model: {name} is missing or misshapen")
        assert isinstance(self._holding, Shares), "restored before it is sharded"
        self._optimizer.load(state.tensors, part=part)
        self._holding.keep_own()
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
