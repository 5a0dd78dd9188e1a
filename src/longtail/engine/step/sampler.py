"""Samplers: from logits to tokens, with keyed noise.

Noise is hashed where it is added, by a native kernel or on a GPU. Elsewhere, and in float64, it is
computed for several positions at once and kept in a table (`noise.NoiseTable`).
"""

import abc
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.step.noise import NoiseSource, NoiseTable, next_positions
from longtail.model.kernels.choice import select_draws
from longtail.model.kernels.draws import Draws
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn, draw_rows
from longtail.speculation.drafter import Noise
from longtail.speculation.tree import depths
from longtail.system.device import to_device


class Sampler(abc.ABC):
    """Draws the tokens of a step."""

    noise: NoiseSource
    """Noise for drafters."""

    @abc.abstractmethod
    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw after the last token of every request, and after every node of its draft."""


@final
class TableSampler(Sampler):
    """Adds noise from a table."""

    def __init__(self, noise: NoiseTable) -> None:
        self.noise = self._table = noise

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw each row with its own noise and parameters."""
        noise = self._table.rows([each.active for each in drawing], _offsets(drawing))
        params = [
            each.active.request.sampling for each in drawing for _ in range(1 + each.draft.size)
        ]
        return draw_rows(logits, noise, params)


@final
class KeyedSampler(Sampler):
    """Hashes noise where it is added."""

    def __init__(self, draws: Draws, vocab_size: int, device: torch.device) -> None:
        self._draws = draws
        self.noise = HashedNoise(draws, vocab_size, device)

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw each row with its own noise and parameters."""
        requests, offsets = [each.active for each in drawing], _offsets(drawing)
        params = [
            active.request.sampling
            for active, ahead in zip(requests, offsets, strict=True)
            for _ in ahead
        ]
        return self._draws.draw_rows(logits, *_positions(requests, offsets), params)


@final
class HashedNoise(NoiseSource):
    """Noise that is computed at each use."""

    def __init__(self, draws: Draws, vocab_size: int, device: torch.device) -> None:
        self._draws, self._vocab_size, self._device = draws, vocab_size, device

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Do nothing."""

    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of any depth, valid until the requests' next tokens."""
        return _Hashed(self._draws, requests, self._vocab_size, self._device)


@final
class _Hashed(Noise):
    """Noise of the next positions of some requests."""

    def __init__(
        self,
        draws: Draws,
        requests: Sequence[ActiveRequest],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(*next_positions(requests))
        self._draws, self._vocab_size = draws, vocab_size
        self._numbers = to_device([self.keys, self.positions], device)

    def at_depth(
        self, depth: int, entries: Int[Tensor, "entries"] | None = None
    ) -> Float[Tensor, "requests entries"]:
        """Return the noise of one depth; depth 1 is the request's next position."""
        keys, firsts = self._numbers
        return self._draws.noise(keys, firsts + (depth - 1), self._vocab_size, entries)


def make_sampler(model: Transformer) -> Sampler:
    """Make the sampler for the model's dtype and device."""
    vocab_size, device = model.config.vocab_size, model.device
    draws = select_draws(model.dtype, device)
    if draws is None:
        return TableSampler(NoiseTable(vocab_size, device))
    return KeyedSampler(draws, vocab_size, device)


def _offsets(drawing: Sequence[Scheduled]) -> list[list[int]]:
    """Return the positions of each request's draws, counted from its next token."""
    return [[0, *depths(each.draft.parents)] for each in drawing]


def _positions(
    requests: Sequence[ActiveRequest], offsets: Sequence[Sequence[int]]
) -> tuple[list[int], list[int]]:
    """Return noise key and position of each draw."""
    keys = [
        active.request.noise_key for active, ahead in zip(requests, offsets, strict=True)
        for _ in ahead
    ]  # fmt: skip
    positions = [
        len(active.tokens) + offset
        for active, ahead in zip(requests, offsets, strict=True)
        for offset in ahead
    ]
    return keys, positions
