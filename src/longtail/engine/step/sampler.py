"""From logits to tokens: who makes the noise, and when.

On a CPU noise is made several places ahead, in a table (`noise.NoiseTable`). On a GPU it is hashed
where it is added and kept nowhere; only rows with a truncation are given theirs in memory.
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

    @property
    @abc.abstractmethod
    def noise(self) -> NoiseSource:
        """Where drafts hear the noise of the places that they would take."""

    @abc.abstractmethod
    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw behind the last token of every request, and behind every node of its draft."""


@final
class TableSampler(Sampler):
    """Adds noise out of a table."""

    def __init__(self, noise: NoiseTable) -> None:
        self._noise = noise

    @property
    def noise(self) -> NoiseSource:
        """The table."""
        return self._noise

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Gather the rows, draw under each row's own parameters."""
        noise = self._noise.rows([each.active for each in drawing], _aheads(drawing))
        params = [
            each.active.request.sampling for each in drawing for _ in range(1 + each.draft.size)
        ]
        return draw_rows(logits, noise, params)


@final
class KeyedSampler(Sampler):
    """Has noise hashed where it is added."""

    def __init__(self, draws: Draws, vocab_size: int, device: torch.device) -> None:
        self._draws, self._device = draws, device
        self._noise = HashedNoise(draws, vocab_size, device)

    @property
    def noise(self) -> NoiseSource:
        """Made when it is heard."""
        return self._noise

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw all rows without truncation, then those with one anew."""
        requests = [each.active for each in drawing]
        params = [
            active.request.sampling
            for active, ahead in zip(requests, _aheads(drawing), strict=True)
            for _ in ahead
        ]
        keys, positions = _places(requests, _aheads(drawing), self._device)
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
    """Noise that is made anew whenever it is asked for."""

    def __init__(self, draws: Draws, vocab_size: int, device: torch.device) -> None:
        self._draws, self._vocab_size, self._device = draws, vocab_size, device

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Nothing is to be made ready."""

    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Noise for drafts of any depth, good until the requests get their next tokens."""
        keys, firsts = _places(requests, [[0]] * len(requests), self._device)
        return _Hashed(self._draws, keys, firsts, self._vocab_size)


@final
class _Hashed(Noise):
    """Noise of the next places of some requests."""

    def __init__(self, draws: Draws, keys: Tensor, firsts: Tensor, vocab_size: int) -> None:
        self._draws, self._keys, self._firsts = draws, keys, firsts
        self._vocab_size = vocab_size

    def at_depth(self, depth: int) -> Float[Tensor, "requests vocab"]:
        """A node of depth 1 takes the request's next place."""
        return self._draws.noise(self._keys, self._firsts + (depth - 1), self._vocab_size)

    def up_to(self, depth: int) -> Float[Tensor, "requests depth vocab"]:
        """Rows of consecutive places."""
        return torch.stack([self.at_depth(d) for d in range(1, depth + 1)], 1)


def make_sampler(model: Transformer) -> Sampler:
    """Choose by what the model computes with."""
    vocab_size, device = model.config.vocab_size, model.device
    draws = select_draws(model.dtype, device)
    if draws is None:
        return TableSampler(NoiseTable(vocab_size, device))
    return KeyedSampler(draws, vocab_size, device)


def _aheads(drawing: Sequence[Scheduled]) -> list[list[int]]:
    """Places that each request's draws take, counted from its next token."""
    return [[0, *depths(each.draft.parents)] for each in drawing]


def _places(
    requests: Sequence[ActiveRequest], aheads: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Noise key and position of each draw."""
    keys = [
        active.request.noise_key for active, ahead in zip(requests, aheads, strict=True)
        for _ in ahead
    ]  # fmt: skip
    positions = [
        len(active.tokens) + place
        for active, ahead in zip(requests, aheads, strict=True)
        for place in ahead
    ]
    both = to_device([keys, positions], device)
    return both[0], both[1]
