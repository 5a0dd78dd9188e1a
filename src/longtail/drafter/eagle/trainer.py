"""Training of an EAGLE drafter on packed sequences, by distillation from its target.

    target (read only) --taps, packed--> features, final states --> p
    drafter  --unroll--> predictions of every depth             --> q
    loss(p, q) --> gradient of the drafter's own tensors        --> AdamW

The trainer owns a drafter and its optimizer, no sequences or files. The loss of each depth is a
mean over the whole batch, so the gradient does not depend on the micro-batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.loss import (
    DECAY,
    FEATURE_WEIGHT,
    TOKEN_WEIGHT,
    Teacher,
    score_rows,
)
from longtail.drafter.eagle.target_states import Interrupted, TargetReader, never
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.drafter.kind import DepthReport, TrainerReport
from longtail.drafter.weights import (
    check_parameters,
    copy_parameters,
    load_parameters,
    with_prefix,
    without_prefix,
)
from longtail.errors import DataError, NonFiniteError
from longtail.model.transformer import Transformer
from longtail.rl.optim import Optimizer
from longtail.rl.packing import moved
from longtail.types import PackedSequences

_LAYER, _OPTIMIZER = "layer/", "optimizer/"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of drafter training."""

    unroll_steps: int = 4
    """Depths that are trained, each on the outputs of the one before (training-time test)."""
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    total_steps: int = 0
    """Step at which linear and cosine schedules reach 0."""
    matrix_rate: float | None = None
    """Muon's learning rate for the matrices; None: AdamW for all parameters."""
    autocast: bool = False
    """Whether matrix products, the target's included, are bfloat16 over float32 weights; a
    bfloat16 target is read in bfloat16 anyway."""


_Sums = tuple[Float[Tensor, ""], Float[Tensor, "depths"], int]
"""Sums over rows: the loss, overlap by depth, and the number of reused rows."""


@dataclass(slots=True)
class _Begun:
    """The finished micro-batches of an update; the parameters hold their gradients."""

    overlaps: Float[Tensor, "depths"]
    num_done: int = 0
    loss: float = 0.0
    num_reused: int = 0


@final
class DrafterTrainer:
    """Trains a drafter, and never writes the target.

    The target's weights may change between steps and within a stopped one. With autocast the target
    must not be packed for inference. A step whose gradient is not finite changes nothing and raises
    NonFiniteError.
    """

    sums: ClassVar[Mapping[str, Tensor]] = {}
    """Empty: the weights follow from gradients."""

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        settings: TrainerSettings,
        *,
        draft_ids: Int[Tensor, "draft"] | None = None,
        head: Float[Tensor, "draft hidden"] | None = None,
    ) -> None:
        assert layer.config.target == target.config, "a drafter is of one target's shape"
        size = layer.config.draft_vocab_size
        assert size == (0 if draft_ids is None else len(draft_ids)), "one id for each draft token"
        self.layer, self._target, self._settings = layer, target, settings
        self.reader = TargetReader(target, layer.dtype, layer.config.taps)
        self.draft_ids = None if draft_ids is None else draft_ids.to(target.device)
        """Target tokens that the drafter can propose; None: all."""
        self.head = None if head is None else head.to(target.device)
        """Head of the drafter if it is not the target's; never trained."""
        layer.requires_grad_(True)
        layer.fuse()
        self._optimizer = _optimizer(layer, settings)
        self.steps = 0
        """Number of updates."""
        self._begun: _Begun | None = None
        """Part of an update that was stopped."""

    def step(
        self, batch: Sequence[PackedSequences], stopped: Callable[[], bool] = never
    ) -> TrainerReport:
        """Make one update on a batch of micro-batches; Interrupted if `stopped` returns True.

        `stopped` is called often, also between the target's layers. Finished micro-batches stay so:
        the next call is given the same batch and continues behind them.
        """
        counts = self._counts(batch, self._settings.unroll_steps)
        if 0 in counts:
            raise DataError(
                f"no sequence of the batch can be drafted {counts.index(0) + 1} tokens deep: give "
                f"longer sequences, or lower drafter.unroll_steps = {len(counts)}"
            )
        if self._begun is None:
            self._begun = _Begun(torch.zeros(len(counts), dtype=torch.float64))
        begun = self._begun
        try:
            with self.reader.interrupted_by(stopped):
                for packed in batch[begun.num_done :]:
                    self.reader.check()
                    self._learn(packed, counts, begun)
                self.reader.check()
            update = self._optimizer.update(self.steps)
        except Interrupted:
            raise
        except BaseException:
            self._discard()
            raise
        self._begun = None
        self.steps += 1
        return TrainerReport(
            loss=begun.loss,
            depths=DepthReport.of(begun.overlaps, counts),
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
            num_tokens=sum(packed.num_tokens for packed in batch),
            num_trained=counts[0],
            num_reused=begun.num_reused,
        )

    def _learn(self, packed: PackedSequences, counts: Sequence[int], begun: _Begun) -> None:
        """Add the gradients of a micro-batch; interrupted, it adds nothing."""
        sums = self._forward(packed, counts)
        if sums is not None:
            loss, overlaps, num_reused = sums
            if not loss.isfinite():
                raise NonFiniteError(
                    f"step {self.steps}: the loss is not finite; no update was made"
                )
            torch.autograd.backward(loss)
            begun.loss += float(loss.detach())
            begun.overlaps += overlaps
            begun.num_reused += num_reused
        begun.num_done += 1

    def _discard(self) -> None:
        self._optimizer.discard()
        self._begun = None

    def evaluate(
        self,
        batch: Sequence[PackedSequences],
        num_depths: int,
        stopped: Callable[[], bool] = never,
    ) -> DepthReport:
        """Measure on sequences without training; Interrupted if stopped, as `step` is.

        Depths that no sequence reaches are left out.
        """
        counts = self._counts(batch, num_depths)
        counts = counts[: counts.index(0)] if 0 in counts else counts
        overlaps = torch.zeros(len(counts), dtype=torch.float64)
        with torch.no_grad(), self.reader.interrupted_by(stopped):
            for packed in batch:
                self.reader.check()
                sums = self._forward(packed, counts)
                if sums is not None:
                    overlaps += sums[1]
        return DepthReport.of(overlaps, counts)

    def tensors(self) -> dict[str, Tensor]:
        """Copy the training state: the drafter, the optimizer's moments."""
        parts = ((_LAYER, self.weights()), (_OPTIMIZER, self._optimizer.tensors()))
        return {name: t for prefix, part in parts for name, t in with_prefix(prefix, part).items()}

    def restore(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state after `steps` updates; CheckpointError if of another drafter."""
        own = without_prefix(_LAYER, tensors)
        check_parameters(own, self.weights(), self.layer.config.target.vocab_size)
        self._optimizer.load(without_prefix(_OPTIMIZER, tensors))
        self._discard()
        self.load_weights(own)
        self.steps = steps

    def weights(self) -> dict[str, Tensor]:
        """Copy the drafter's parameters."""
        return copy_parameters(self.layer)

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the parameters and keep the moments; CheckpointError if misshapen."""
        load_parameters(self.layer, weights)

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Start from other parameters, without moments or steps; CheckpointError if misshapen."""
        self.restore(0, with_prefix(_LAYER, weights))

    def _counts(self, batch: Sequence[PackedSequences], num_depths: int) -> list[int]:
        """Count the batch's rows in the loss at each depth."""
        counts = [0] * num_depths
        for packed in batch:
            pairs = Pairs.of(packed)
            for step in range(num_depths):
                counts[step] += int((pairs.trained & pairs.exist(step)).sum())
        return counts

    def _forward(self, packed: PackedSequences, counts: Sequence[int]) -> _Sums | None:
        """Return a micro-batch's part of the batch's sums; None if no row is in the loss."""
        here = moved(packed, self._target.device)
        pairs = Pairs.of(here).for_loss(len(counts))
        chosen = pairs.trained[pairs.chosen].nonzero()[:, 0]
        if not len(chosen):
            return None
        in_loss = pairs.chosen[chosen]
        dtype = self._target.dtype
        with self._autocast(enabled=dtype == torch.float32):  # others compute in their own
            states = self.reader.read(here, pairs)
        self.reader.check()
        with self._autocast():
            outputs = unroll(self.layer, states.features, states.embeddings, pairs, len(counts))
            scored = torch.stack([output.scored.index_select(0, chosen) for output in outputs])
        head = self._target.head.weight.detach()
        if dtype != torch.float64:
            head = head.to(torch.bfloat16 if self._settings.autocast else torch.float32)
        teacher = Teacher(
            hidden=states.after.index_select(0, in_loss),
            head=head,
            draft_ids=self.draft_ids,
            drafter_head=self.head,
        )
        exist = torch.stack([pairs.exist(depth)[in_loss] for depth in range(len(counts))])
        loss, overlaps = self._loss(scored, teacher, exist, counts)
        return loss, overlaps, int(states.reused[in_loss].sum())

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        device = self._target.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self._settings.autocast and enabled)

    def _loss(
        self,
        scored: Float[Tensor, "depths rows hidden"],
        teacher: Teacher,
        exist: Bool[Tensor, "depths rows"],
        counts: Sequence[int],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "depths"]]:
        """Return the loss, and the sums of the overlap over rows."""
        rows = score_rows(scored, teacher, self.reader.check)
        per_row = rows.cross_entropy
        if self.layer.config.recipe == "eagle1":
            wanted = teacher.hidden.to(scored.dtype).expand_as(scored)
            regression = F.smooth_l1_loss(scored, wanted, reduction="none").mean(-1)
            per_row = FEATURE_WEIGHT * regression + TOKEN_WEIGHT * per_row
        weights = [DECAY**depth / count for depth, count in enumerate(counts)]
        loss = ((per_row * exist).sum(-1) * per_row.new_tensor(weights)).sum()
        with torch.no_grad():
            return loss, (rows.overlap * exist).sum(-1, dtype=torch.float64).cpu()


def _optimizer(layer: EagleLayer, settings: TrainerSettings) -> Optimizer:
    """Return Muon for the matrices, if it has a rate; AdamW for all other parameters."""
    named, rate = dict(layer.named_parameters()), settings.matrix_rate
    return Optimizer(
        named.items(),
        settings.optimizer,
        total_steps=settings.total_steps,
        matrices=[name for name, p in named.items() if p.dim() == 2 and rate is not None],
        matrix_rate=rate or 0.0,
    )
