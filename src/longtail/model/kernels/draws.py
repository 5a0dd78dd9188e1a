"""Sampling with keyed noise that need not be stored: the interface and its reference.

With a vocabulary of 150k entries the noise is as large as the logits. `TorchDraws`, the reference
implementation, stores it; on a GPU it is hashed where it is added.
"""

import abc
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.sampling import Drawn, gumbel_noise


class Draws(abc.ABC):
    """Noise g[key, position, v] of `sampling.gumbel_noise`, and sampling with it."""

    @abc.abstractmethod
    def noise(
        self, keys: Int[Tensor, "rows"], positions: Int[Tensor, "rows"], vocab_size: int
    ) -> Float[Tensor, "rows vocab"]:
        """Return the noise (float32)."""

    @abc.abstractmethod
    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        temperatures: Float[Tensor, "rows"],
    ) -> Drawn:
        """Sample one token per row, as `sampling.draw` without truncation; 0 is greedy."""


@final
class TorchDraws(Draws):
    """The reference implementation."""

    def noise(
        self, keys: Int[Tensor, "rows"], positions: Int[Tensor, "rows"], vocab_size: int
    ) -> Float[Tensor, "rows vocab"]:
        """Return `sampling.gumbel_noise`."""
        return gumbel_noise(keys, positions, vocab_size)

    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        temperatures: Float[Tensor, "rows"],
    ) -> Drawn:
        """Add the noise to all logprobs and take the argmax."""
        warm = (temperatures > 0)[:, None]
        scores = logits if logits.dtype == torch.float64 else logits.float()
        scores = torch.where(warm, scores / temperatures[:, None].clamp(min=1e-30), scores)
        logprobs = scores.log_softmax(-1)
        noise = gumbel_noise(keys, positions, logits.shape[1])
        tokens = torch.where(warm, logprobs + noise, scores).argmax(-1)
        drawn = logprobs.gather(-1, tokens[:, None])[:, 0]
        return Drawn(tokens=tokens, logprobs=torch.where(warm[:, 0], drawn, 0.0 * drawn))
