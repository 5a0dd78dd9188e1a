"""Supervised learning of completions: packed examples in, better weights out.

It owns the training copy of a model and its optimizer. The loss is the mean negative log-likelihood
of the completions' tokens over the whole batch, so the gradient does not depend on the division
into micro-batches. `rl.data.examples` makes the examples.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from longtail.config.sft import SftTrainSection
from longtail.errors import NonFiniteError
from longtail.model.policy import Policy
from longtail.rl.data.examples import Example
from longtail.rl.logprobs import TokenScores, score
from longtail.rl.optim import Optimizer, check_loss, load_parameters
from longtail.rl.packing import pack_sequences
from longtail.types import SamplingParams


@final
class SftLearner:
    """Owns the model given and its optimizer.

    A step whose loss or gradient is not finite is not made and raises NonFiniteError.
    """

    def __init__(self, model: Policy, settings: SftTrainSection) -> None:
        self._model, self._parameters = model, model.trainable()
        self._model.fuse()
        self._settings = settings
        self._optimizer = Optimizer(self._parameters.items(), settings, total_steps=settings.steps)
        self.steps = 0
        """Number of updates made."""

    def step(self, examples: Sequence[Example]) -> dict[str, float]:
        """Make one update that raises the likelihood of the completions; return its metrics.

        Loss and entropy are means over completion tokens, in nats.
        """
        num_trained = sum(len(e.tokens) - e.prompt_len for e in examples)
        loss = entropy = 0.0
        try:
            for scores in self._scores(examples):
                part = -scores.logprobs.sum() / num_trained
                check_loss(self._parameters, part.item(), self.steps, "the loss")
                torch.autograd.backward(part)
                loss += part.item()
                entropy += float(scores.entropy.sum()) / num_trained
            update = self._optimizer.update(self.steps)
        except NonFiniteError:
            self._optimizer.discard()
            raise
        self.steps += 1
        return {
            "train/loss": loss,
            "train/entropy": entropy,
            "train/grad_norm": update.grad_norm,
            "train/learning_rate": update.learning_rate,
            "train/tokens": sum(len(e.tokens) for e in examples),
        }

    def loss(self, examples: Sequence[Example]) -> float:
        """Return the mean negative log-likelihood of the completions' tokens, without an update."""
        with torch.no_grad():
            parts = [-each.logprobs.double().sum() for each in self._scores(examples)]
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
        self.steps = steps

    def _scores(self, examples: Sequence[Example]) -> Iterator[TokenScores]:
        own = self._settings
        for packed in pack_sequences(examples, own.tokens_per_micro_batch):
            yield score(
                self._model,
                packed,
                SamplingParams(),
                autocast=own.autocast is True,
                recompute=own.gradient_checkpointing,
            )
