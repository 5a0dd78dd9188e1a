"""Taps: the hidden states of the target that a drafter reads."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Places in the decoder where features are taken; a token's features are these, concatenated.

    Example: Taps(final=True) for EAGLE-1, Taps(layers=(2, 4, 5)) for EAGLE-3
    """

    layers: tuple[int, ...] = ()
    """Layers whose input residual stream is taken, in rising order."""
    final: bool = False
    """Whether the final normed hidden state, the LM head's input, is taken."""

    @property
    def any(self) -> bool:
        """Whether there is any tap."""
        return self.final or bool(self.layers)

    def union(self, other: "Taps") -> "Taps":
        """Return the taps of both."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Taps(layers=layers, final=self.final or other.final)

    def pick(
        self, wanted: "Taps", features: Float[Tensor, "tokens features"] | None
    ) -> Float[Tensor, "tokens some"] | None:
        """Return the columns of `wanted`, a subset of these taps, from features of these taps."""
        if wanted == self or features is None or not wanted.any:
            return features if wanted.any else None
        parts = features.chunk(len(self.layers) + self.final, dim=1)
        picked = [parts[self.layers.index(layer)] for layer in wanted.layers]
        return torch.cat([*picked, *parts[-1:]] if wanted.final else picked, dim=1)


NO_TAPS = Taps()
