"""Cache slots and tree masks of draft nodes, level by level."""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.model.kernels.ops import Places
from longtail.speculation.grow import Frontier


@final
class NodePlaces:
    """Assigns the slots after each request's text to nodes, in the order of expansion."""

    def __init__(self, rows: Int[Tensor, "requests"], ends: Int[Tensor, "requests"]) -> None:
        self._rows, self._ends = rows, ends
        self._visible = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        self._num_placed = 0

    def roots(self) -> Places:
        """Return the places of the roots, the last slot of each text."""
        none = torch.zeros_like(self._rows)
        return Places(self._rows, self._ends - 1, self._ends, none, none)

    def place(self, frontier: Frontier) -> Places:
        """Place the next level; a node attends to the text, its ancestors and itself."""
        num, many = len(self._rows), frontier.per_request
        first = self._num_placed
        self._num_placed += many
        own = torch.arange(first, first + many, device=self._rows.device)
        above = self._visible.gather(1, frontier.parents.view(num, many))
        self._visible = above | (1 << own)
        ends = self._ends.repeat_interleave(many)
        return Places(
            rows=self._rows.repeat_interleave(many),
            slots=ends + own.repeat(num),
            contexts=ends,
            depths=torch.full_like(ends, frontier.depth),
            visible=self._visible.flatten(),
        )
