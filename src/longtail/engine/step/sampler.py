"""Samplers: from logits to tokens, with keyed noise.

On a CPU noise is computed for several positions at once, in a table (`noise.NoiseTable`). On a GPU
it is hashed where it is added and never stored, except for rows with truncation.
"""

import abc
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.step.noise import NoiseSource, NoiseTable
from longtail.model.kernels.choice import select_draws
from longtail.model.kernels.draws import Draws
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn, draw_rows, is_truncated
from longtail.speculation.drafter import Noise
from longtail.speculation.tree import depths
from longtail.system.transfer import to_device


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
        self._draws, self._device = draws, device
        self.noise = HashedNoise(draws, vocab_size, device)

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw all rows without truncation, then draw truncated rows again."""
        requests = [each.active for each in drawing]
        params = [
            active.request.sampling
            for active, ahead in zip(requests, _offsets(drawing), strict=True)
            for _ in ahead
        ]
        keys, positions = _positions(requests, _offsets(drawing), self._device)
        temperatures = to_device([each.temperature for each in params], self._device)
        drawn = self._draws.draw(logits, keys, positions, temperatures)
        cut = [row for row, each in enumerate(params) if each.temperature and is_truncated(each)]
        if cut:
            rows = to_device(cut, self._device)
            noise = self._draws.noise(keys[rows], positions[rows], logits.shape[1])
            again = draw_rows(logits[rows], noise, [params[row] for row in cut])
            drawn.tokens[rows], drawn.logprobs[rows] = again.tokens, again.logprobs
        return drawn


@final
class HashedNoise(NoiseSource):
    """Noise that is computed at each use."""

    def __init__(self, draws: Draws, vocab_size: int, device: torch.device) -> None:
        self._draws, self._vocab_size, self._device = draws, vocab_size, device

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Do nothing."""

    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of any depth, valid until the requests' next tokens."""
        keys, firsts = _positions(requests, [[0]] * len(requests), self._device)
        return _Hashed(self._draws, keys, firsts, self._vocab_size)


@final
class _Hashed(Noise):
    """Noise of the next positions of some requests."""

    def __init__(self, draws: Draws, keys: Tensor, firsts: Tensor, vocab_size: int) -> None:
        self._draws, self._keys, self._firsts = draws, keys, firsts
        self._vocab_size = vocab_size

    def at_depth(self, depth: int) -> Float[Tensor, "requests vocab"]:
        """Return the noise of one depth; depth 1 is the request's next position."""
        return self._draws.noise(self._keys, self._firsts + (depth - 1), self._vocab_size)

    def up_to(self, depth: int) -> Float[Tensor, "requests depth vocab"]:
        """Return the noise of consecutive positions."""
        return torch.stack([self.at_depth(d) for d in range(1, depth + 1)], 1)


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
    requests: Sequence[ActiveRequest], offsets: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
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
    both = to_device([keys, positions], device)
    return both[0], both[1]
