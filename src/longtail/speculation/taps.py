"""Taps: the hidden states of the target that drafters read as features."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """A selection of the decoder's hidden states; concatenated, they are a token's features.

    Example: Taps(final=True) for EAGLE-1, Taps(layers=(2, 4, 5)) for EAGLE-3
    """

    layers: tuple[int, ...] = ()
    """The residual stream as it enters these layers, in rising order."""
    final: bool = False
    """The normed hidden state that the LM head reads."""

    @property
    def any(self) -> bool:
        """Whether any state is selected."""
        return self.final or bool(self.layers)

    def union(self, other: "Taps") -> "Taps":
        """Return the taps that are in either selection."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Taps(layers=layers, final=self.final or other.final)

    def pick(
        self, wanted: "Taps", features: Float[Tensor, "tokens features"] | None
    ) -> Float[Tensor, "tokens some"] | None:
        """Return the columns of `features` (of these taps) that belong to the taps `wanted`."""
        if wanted == self or features is None or not wanted.any:
            return features if wanted.any else None
        parts = features.chunk(len(self.layers) + self.final, dim=1)
        picked = [parts[self.layers.index(layer)] for layer in wanted.layers]
        return torch.cat([*picked, *parts[-1:]] if wanted.final else picked, dim=1)


NO_TAPS = Taps()
