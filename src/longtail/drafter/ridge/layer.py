"""The ridge drafter's weights: linear maps from one state to the states of the next tokens.

The pair (final state at token i, embedding of token i + 1), as in `drafter.eagle.layer`, gives the
states of a whole block at once; each is then moved by the token that was drafted before it:

    stream[k] = A[k] [state of i; embedding of i + 1]                   k = 1 .. slots
    state of i + k  ~  stream[k] + T[k] embedding of i + k              for k > 1

The target's head reads a state and scores token i + k + 1. A block takes one pass where a chain of
EAGLE takes one per token, and its weights are the least squares of `sums`.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from longtail.config.drafter import Slots
from longtail.drafter.kind import DraftConfig, DraftLayer
from longtail.model.kernels.linear import Linear
from longtail.speculation.drafter import Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class RidgeConfig(DraftConfig):
    """Shape of a ridge drafter."""

    recipe: Literal["ridge"] = "ridge"
    slots: Slots = 6
    """Tokens of a block."""

    @property
    def taps(self) -> Taps:
        """Target states that the layer reads."""
        return Taps(final=True)

    @property
    def max_depth(self) -> int:
        """Tokens of a block."""
        return self.slots


class RidgeLayer(DraftLayer):
    """The linear maps."""

    config: RidgeConfig

    def __init__(self, config: RidgeConfig) -> None:
        super().__init__()
        hidden, slots = config.target.hidden_size, config.slots
        self.config = config
        self.streams = nn.ModuleList(Linear(2 * hidden, hidden) for _ in range(slots))
        self.transitions = nn.ModuleList(Linear(hidden, hidden) for _ in range(slots - 1))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        slot: int,
        inputs: Float[Tensor, "rows joined"],
        before: Float[Tensor, "nodes hidden"] | None,
        per_row: int = 1,
    ) -> Float[Tensor, "nodes hidden"]:
        """Return the states at `slot` (from 1), `per_row` of each row.

        `inputs` are pairs of state and embedding, joined; `before` are the embeddings of the tokens
        drafted before, which only the first slot has not.
        """
        stream: Tensor = self.streams[slot - 1](inputs)
        if slot == 1:
            return stream
        return stream.repeat_interleave(per_row, 0) + self.transitions[slot - 2](before)
