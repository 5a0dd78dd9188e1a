"""Samplers: from logits to tokens, with keyed noise.

Noise is hashed where it is added, by a native kernel. Without one, and in float64, it is computed
for several positions at once and kept in a table (`NoiseTable`).
"""

import abc
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.model.kernels.draws import NativeDraws, select_draws
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn, draw_rows, gumbel_noise
from longtail.speculation.drafter import Noise
from longtail.speculation.tree import depths
from longtail.types import SamplingParams


class Sampler(abc.ABC):
    """Draws the tokens of a step, and gives drafters the noise of positions without a token yet."""

    @abc.abstractmethod
    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Prepare the next `ahead` + 1 positions of each request, if noise is stored."""

    @abc.abstractmethod
    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of at most `depth`, valid until the requests' next tokens."""

    @abc.abstractmethod
    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw after the last token of every request, and after every node of its draft.

        Each row has its own noise and parameters.
        """


def next_positions(requests: Sequence[ActiveRequest]) -> tuple[list[int], list[int]]:
    """Return the noise key of each request, and the position of its next token."""
    keys = [active.request.noise_key for active in requests]
    return keys, [len(active.tokens) for active in requests]


@final
class NoiseTable(Sampler):
    """Adds noise from a table of the next positions of each request.

    The noise of a position does not depend on its token, and a few large tensor operations cost
    less than many small ones. Values are those of `sampling.gumbel_noise` for any grouping.
    Verification and drafting read the same table.
    """

    def __init__(self, vocab_size: int, *, max_entries: int = 2**19) -> None:
        self._vocab_size, self._max_entries = vocab_size, max_entries
        # The key is the request itself: a later one may have the same id and another noise key.
        self._starts: dict[ActiveRequest, int] = {}
        self._rows: dict[ActiveRequest, int] = {}
        self._table = torch.empty(0, 0, vocab_size)

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw each row with its own noise and parameters."""
        noise = self.rows([each.active for each in drawing], _offsets(drawing))
        return draw_rows(logits, noise, _params(drawing))

    def rows(
        self, requests: Sequence[ActiveRequest], aheads: Sequence[Sequence[int]]
    ) -> Float[Tensor, "drawing vocab"]:
        """Return noise of positions of each request, counted from its next token (0).

        Example: rows([a, b], [[0], [0, 1, 1]]) has one row of a and three rows of b
        """
        self.prepare(requests, max(max(ahead) for ahead in aheads))
        rows: list[int] = []
        offsets: list[int] = []
        for active, ahead in zip(requests, aheads, strict=True):
            rows += [self._rows[active]] * len(ahead)
            offset = len(active.tokens) - self._starts[active]
            offsets += [offset + row for row in ahead]
        return self._gather(rows, offsets)

    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of at most `depth`, valid until the requests' next tokens."""
        self.prepare(requests, depth)
        return _TableNoise(
            requests,
            table=self._table,
            rows=torch.tensor([self._rows[active] for active in requests]),
            offsets=torch.tensor([self._offset(active) for active in requests]),
        )

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Extend the table to the next `ahead` + 1 positions of each request."""
        last = self._table.shape[1] - 1 - ahead
        if not all(0 <= self._offset(active) <= last for active in requests):
            self._refill(requests, ahead + 1)

    def _gather(self, rows: list[int], offsets: list[int]) -> Float[Tensor, "drawing vocab"]:
        where = torch.tensor([rows, offsets])
        return self._table[where[0], where[1]]

    def _offset(self, active: ActiveRequest) -> int:
        """Return the column of the request's next position in the table; -1 if it has no row."""
        start = self._starts.get(active)
        return -1 if start is None else len(active.tokens) - start

    def _refill(self, requests: Sequence[ActiveRequest], least: int) -> None:
        """Make a table from every request's next position on; known noise is copied."""
        count, old = len(requests), self._table
        depth = max(least, min(32, self._max_entries // (count * self._vocab_size)))
        firsts = [self._offset(active) for active in requests]
        kept = [max(old.shape[1] - first, 0) if first >= 0 else 0 for first in firsts]
        starts = [len(active.tokens) for active in requests]
        columns = torch.arange(depth)
        numbers = torch.tensor(
            [
                [active.request.noise_key for active in requests],
                starts,
                kept,
                firsts,
                [self._rows.get(active, 0) for active in requests],
            ],
        )
        keys, begin, have, first, row = numbers[:, :, None]
        missing = columns >= have
        table = torch.empty(count, depth, self._vocab_size)
        table[missing] = gumbel_noise(
            keys.expand_as(missing)[missing], (begin + columns)[missing], self._vocab_size
        )
        if any(kept):
            there = ~missing
            table[there] = old[row.expand_as(there)[there], (first + columns)[there]]
        self._table = table
        self._rows = {active: row for row, active in enumerate(requests)}
        self._starts = dict(zip(requests, starts, strict=True))


@final
class _TableNoise(Noise):
    """Rows of the table by depth."""

    def __init__(
        self, requests: Sequence[ActiveRequest], *, table: Tensor, rows: Tensor, offsets: Tensor
    ) -> None:
        super().__init__(*next_positions(requests))
        self._table, self._rows, self._offsets = table, rows, offsets

    def at_depth(
        self, depth: int, entries: Int[Tensor, "entries"] | None = None
    ) -> Float[Tensor, "requests entries"]:
        """Return the noise of one depth; depth 1 is the request's next position."""
        noise = self._table[self._rows, self._offsets + (depth - 1)]
        return noise if entries is None else noise[:, entries]


@final
class KeyedSampler(Sampler):
    """Hashes noise where it is added, and again at each use by drafters."""

    def __init__(self, draws: NativeDraws, vocab_size: int) -> None:
        self._draws, self._vocab_size = draws, vocab_size

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw each row with its own noise and parameters."""
        keys, positions = [], []
        for each, offsets in zip(drawing, _offsets(drawing), strict=True):
            keys += [each.active.request.noise_key] * len(offsets)
            positions += [len(each.active.tokens) + offset for offset in offsets]
        return self._draws.draw_rows(logits, keys, positions, _params(drawing))

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Do nothing."""

    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of any depth, valid until the requests' next tokens."""
        return _Hashed(requests, self._vocab_size)


@final
class _Hashed(Noise):
    """Noise of the next positions of some requests."""

    def __init__(self, requests: Sequence[ActiveRequest], vocab_size: int) -> None:
        super().__init__(*next_positions(requests))
        self._vocab_size = vocab_size
        self._numbers = torch.tensor([self.keys, self.positions])

    def at_depth(
        self, depth: int, entries: Int[Tensor, "entries"] | None = None
    ) -> Float[Tensor, "requests entries"]:
        """Return the noise of one depth; depth 1 is the request's next position."""
        keys, firsts = self._numbers
        return gumbel_noise(keys, firsts + (depth - 1), self._vocab_size, entries)


def make_sampler(model: Transformer) -> Sampler:
    """Make the sampler for the model's dtype."""
    vocab_size, draws = model.config.vocab_size, select_draws(model.dtype)
    if draws is None:
        return NoiseTable(vocab_size)
    return KeyedSampler(draws, vocab_size)


def _offsets(drawing: Sequence[Scheduled]) -> list[list[int]]:
    """Return the positions of each request's draws, counted from its next token."""
    return [[0, *depths(each.draft.parents)] for each in drawing]


def _params(drawing: Sequence[Scheduled]) -> list[SamplingParams]:
    """Return the parameters of each draw."""
    return [each.active.request.sampling for each in drawing for _ in range(1 + each.draft.size)]
