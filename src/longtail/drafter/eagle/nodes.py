"""Where the nodes of drafts lie in a drafter's own cache while it walks down, and what they see."""

from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.model.kernels.ops import Places
from longtail.speculation.grow import Frontier


@final
class NodePlaces:
    """Slots of nodes behind each request's text, in the order in which they are drafted on."""

    def __init__(self, rows: Int[Tensor, "requests"], ends: Int[Tensor, "requests"]) -> None:
        self._rows, self._ends = rows, ends
        self._visible = torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        self._num_placed = 0

    def roots(self) -> Places:
        """Places of the roots, which are the last of their texts."""
        none = torch.zeros_like(self._rows)
        return Places(self._rows, self._ends - 1, self._ends, none, none)

    def place(self, frontier: Frontier) -> Places:
        """Place the nodes of the next level: they see the text, their ancestors and themselves."""
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
