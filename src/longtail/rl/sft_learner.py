"""Supervised learning of completions: packed examples in, better weights out.

It owns the training copy of a model and its optimizer. The loss is the mean negative log-likelihood
of the completions' tokens over the whole batch, so how a batch is cut into micro-batches cannot
change the gradient. Where examples come from is `rl.data.examples`'s business, files are the
caller's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.errors import CheckpointError, ConfigError, NonFiniteError
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.logprobs import TokenScores, score
from longtail.rl.muon import MuonOptimizer
from longtail.rl.optim import Optimizer, OptimizerSettings
from longtail.rl.packing import moved, pack
from longtail.types import PackedSequences, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SftSettings:
    """How examples are learned.

    Example: SftSettings(optimizer=OptimizerSettings(learning_rate=1e-5), autocast=True)
    """

    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    matrix_rate: float | None = None
    """Muon's learning rate of the matrices inside layers; None learns them by AdamW, too."""
    tokens_per_micro_batch: int = 8192
    recompute: bool = False
    """Gradient checkpointing of the decoder's layers."""
    autocast: bool = False
    """bfloat16 matrix products over float32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """What one step did.

    Example: SftReport(loss=0.31, entropy=0.29, num_tokens=2040, num_trained=1820,
                             grad_norm=0.8, learning_rate=1e-3)
    """

    loss: float
    """Nats a completion token."""
    entropy: float
    """Of the model's own next-token distribution, nats a completion token."""
    num_tokens: int
    num_trained: int
    grad_norm: float
    learning_rate: float


@final
class SftLearner:
    """Owns the model given and its optimizer.

    A step whose loss or gradient is not finite is not made and raises NonFiniteError.
    """

    def __init__(self, model: Transformer, settings: SftSettings) -> None:
        if settings.autocast and model.dtype != torch.float32:
            raise ConfigError(f"train.autocast = true with {model.dtype} weights: it needs float32")
        self._model = model.requires_grad_(True)
        self._model.fuse()
        self._settings = settings
        self._optimizer: Optimizer | MuonOptimizer = (
            Optimizer(model.named_parameters(), settings.optimizer)
            if settings.matrix_rate is None
            else MuonOptimizer(model, settings.optimizer, matrix_rate=settings.matrix_rate)
        )
        self._steps = 0

    @property
    def steps(self) -> int:
        """Updates made."""
        return self._steps

    def step(self, examples: Sequence[Example]) -> SftReport:
        """Make one update towards the completions of `examples`."""
        num_trained = sum(len(e.tokens) - e.prompt_len for e in examples)
        loss = entropy = 0.0
        try:
            for packed in self._packs(examples):
                scores = self._score(packed)
                part = -scores.logprobs.sum() / num_trained
                self._refuse_non_finite(part)
                torch.autograd.backward(part)
                loss += float(part.detach())
                entropy += float(scores.entropy.sum()) / num_trained
            update = self._optimizer.update(self._steps)
        except NonFiniteError:
            self._optimizer.discard()
            raise
        self._steps += 1
        return SftReport(
            loss=loss,
            entropy=entropy,
            num_tokens=sum(len(e.tokens) for e in examples),
            num_trained=num_trained,
            grad_norm=update.grad_norm,
            learning_rate=update.learning_rate,
        )

    def loss(self, examples: Sequence[Example]) -> float:
        """Return the mean negative log-likelihood of the completions' tokens, learning nothing."""
        with torch.no_grad():
            parts = [
                -self._score(packed).logprobs.double().sum() for packed in self._packs(examples)
            ]
        return float(sum(parts)) / sum(len(e.tokens) - e.prompt_len for e in examples)

    def tensors(self) -> dict[str, Tensor]:
        """Copy the optimizer's moments."""
        return self._optimizer.tensors()

    def restore(
        self, steps: int, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]
    ) -> None:
        """Go on exactly where `steps` updates had led; CheckpointError if of another model."""
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            if name not in weights or weights[name].shape != parameter.shape:
                raise CheckpointError(f"weights of another model: {name} is missing or misshapen")
        self._optimizer.load(tensors)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        self._steps = steps

    def _packs(self, examples: Sequence[Example]) -> list[PackedSequences]:
        packs = pack(
            [e.tokens for e in examples],
            [e.prompt_len for e in examples],
            self._settings.tokens_per_micro_batch,
        )
        return [one.packed for one in packs]

    def _score(self, packed: PackedSequences) -> TokenScores:
        device = self._model.device
        here = moved(packed, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._settings.autocast):
            return score(self._model, here, SamplingParams(), recompute=self._settings.recompute)

    def _refuse_non_finite(self, loss: Float[Tensor, ""]) -> None:
        if loss.isfinite():
            return
        broken = (n for n, p in self._model.named_parameters() if not p.isfinite().all())
        culprit = next(broken, "the loss")
        raise NonFiniteError(f"step {self._steps}: {culprit} is not finite; no update was made")
