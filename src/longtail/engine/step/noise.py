"""Keyed noise of the next positions of the requests in progress, computed in large groups.

For machines without native sampling, and for float64. The noise of a position does not depend on
its token, and a few large tensor operations cost less than many small ones. Values are those of
`sampling.gumbel_noise` for any grouping. Verification and drafting read the same table.
"""

import abc
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.sampling import gumbel_noise
from longtail.speculation.drafter import Noise


class NoiseSource(abc.ABC):
    """Noise of positions without a token yet."""

    @abc.abstractmethod
    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Prepare the next `ahead` + 1 positions of each request, if the source stores noise."""

    @abc.abstractmethod
    def for_drafts(self, requests: Sequence[ActiveRequest], depth: int) -> Noise:
        """Return noise for drafts of at most `depth`, valid until the requests' next tokens."""


def next_positions(requests: Sequence[ActiveRequest]) -> tuple[list[int], list[int]]:
    """Return the noise key of each request, and the position of its next token."""
    keys = [active.request.noise_key for active in requests]
    return keys, [len(active.tokens) for active in requests]


@final
class NoiseTable(NoiseSource):
    """A table of noise for the next positions of each request."""

    def __init__(self, vocab_size: int, device: torch.device, *, max_entries: int = 2**19) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._max_entries = max_entries
        # The key is the request itself: a later one may have the same id and another noise key.
        self._starts: dict[ActiveRequest, int] = {}
        self._rows: dict[ActiveRequest, int] = {}
        self._table = torch.empty(0, 0, vocab_size, device=device)

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
            rows=torch.tensor([self._rows[active] for active in requests], device=self._device),
            offsets=torch.tensor(
                [self._offset(active) for active in requests], device=self._device
            ),
        )

    def prepare(self, requests: Sequence[ActiveRequest], ahead: int) -> None:
        """Extend the table to the next `ahead` + 1 positions of each request."""
        last = self._table.shape[1] - 1 - ahead
        if not all(0 <= self._offset(active) <= last for active in requests):
            self._refill(requests, ahead + 1)

    def _gather(self, rows: list[int], offsets: list[int]) -> Float[Tensor, "drawing vocab"]:
        where = torch.tensor([rows, offsets], device=self._device)
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
        columns = torch.arange(depth, device=self._device)
        numbers = torch.tensor(
            [
                [active.request.noise_key for active in requests],
                starts,
                kept,
                firsts,
                [self._rows.get(active, 0) for active in requests],
            ],
            device=self._device,
        )
        keys, begin, have, first, row = numbers[:, :, None]
        missing = columns >= have
        table = torch.empty(count, depth, self._vocab_size, device=self._device)
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
