"""Supervised learning of completions: packed examples in, better weights out.

It owns the training copy of a model and its optimizer. The loss is the mean negative log-likelihood
of the completions' tokens over the whole batch, so the gradient does not depend on the division
into micro-batches. `rl.data.examples` makes the examples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from longtail.config.sft import SftTrainSection
from longtail.errors import ConfigError, NonFiniteError
from longtail.model.policy import Policy
from longtail.rl.data.examples import Example
from longtail.rl.logprobs import TokenScores, score
from longtail.rl.optim import Optimizer, load_parameters, loss_error
from longtail.rl.packing import pack_texts
from longtail.types import PackedSequences, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """Report of one step.

    Example: SftReport(loss=0.31, entropy=0.29, num_tokens=2040, num_trained=1820, grad_norm=0.8,
                       learning_rate=1e-3)
    """

    loss: float
    """Mean over completion tokens, in nats."""
    entropy: float
    """Mean entropy of the model's next-token distribution, in nats per completion token."""
    num_tokens: int
    num_trained: int
    grad_norm: float
    learning_rate: float


@final
class SftLearner:
    """Owns the model given and its optimizer.

    A step whose loss or gradient is not finite is not made and raises NonFiniteError.
    """

    def __init__(self, model: Policy, settings: SftTrainSection) -> None:
        if settings.autocast is True and model.dtype != torch.float32:
            raise ConfigError(f"train.autocast = true with {model.dtype} weights: it needs float32")
        self._model, self._parameters = model, model.trainable()
        self._model.fuse()
        self._settings = settings
        self._optimizer = Optimizer(self._parameters.items(), settings, total_steps=settings.steps)
        self._steps = 0

    @property
    def steps(self) -> int:
        """Number of updates made."""
        return self._steps

    def step(self, examples: Sequence[Example]) -> SftReport:
        """Make one update that raises the likelihood of the completions."""
        num_trained = sum(len(e.tokens) - e.prompt_len for e in examples)
        loss = entropy = 0.0
        try:
            for packed in self._packs(examples):
                scores = self._score(packed)
                part = -scores.logprobs.sum() / num_trained
                failure = loss_error(self._parameters, part, self._steps, "the loss")
                if failure is not None:
                    raise failure
                torch.autograd.backward(part)
                loss += float(part.detach())
                entropy += float(scores.entropy.sum()) / num_trained
            for parameter in self._parameters.values():
                if parameter.grad is None:  # of experts that no token has reached
                    parameter.grad = torch.zeros_like(parameter)
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
        """Return the mean negative log-likelihood of the completions' tokens, without an update."""
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
        """Continue after `steps` updates; CheckpointError if the tensors are another model's."""
        self._optimizer.load(tensors)
        load_parameters(self._parameters, weights)
        self._steps = steps

    def _packs(self, examples: Sequence[Example]) -> list[PackedSequences]:
        return pack_texts(examples, self._settings.tokens_per_micro_batch)

    def _score(self, packed: PackedSequences) -> TokenScores:
        own = self._settings
        return score(
            self._model,
            packed,
            SamplingParams(),
            autocast=own.autocast is True,
            recompute=own.gradient_checkpointing,
        )
