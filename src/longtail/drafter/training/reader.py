"""What the target says about packed texts: taken from who has it, computed where nobody has.

    packed --sequence by sequence--> recall --rows---------------------------> states --> features
                                        `--none--> one packed pass over those ---^  `--> final

A state follows from the weights and the tokens before it, so it does not matter who computed it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.unroll import Pairs
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.speculation.taps import Taps
from longtail.types import PackedSequences

StateLookup = Callable[[Sequence[int], int], Tensor | None]
"""Tokens of a text and the length of its prompt -> what `training_taps` give of the target at each
token, as under its present weights, or None. The last row is never read."""
_FINAL = Taps(final=True)


def training_taps(recipe: Taps) -> Taps:
    """Name what teaching reads: the recipe's features, and the final state for the head."""
    return recipe.union(_FINAL)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target says about pairs."""

    features: Float[Tensor, "pairs features"]
    """Of the first token."""
    embeddings: Float[Tensor, "pairs hidden"]
    """Of the second."""
    after: Float[Tensor, "pairs hidden"]
    """Final state at the second: what the head reads to predict the token after the pair."""
    reused: Bool[Tensor, "pairs"]
    """Whether it was recalled."""


@final
class TargetReader:
    """Reads a target for a drafter of its shape, and never writes it."""

    def __init__(self, target: Transformer, layer: EagleLayer, lookup: StateLookup | None) -> None:
        self._target, self._dtype, self._lookup = target, layer.dtype, lookup
        self._recipe, self._taps = layer.config.taps, training_taps(layer.config.taps)

    @torch.no_grad()
    def read(self, packed: PackedSequences, pairs: Pairs) -> Reading:
        """Read what teaching needs of all pairs; `packed` is where the target is."""
        found = self._looked_up(packed)
        states = self._states(packed, found)
        features, final = (self._taps.pick(taps, states) for taps in (self._recipe, _FINAL))
        assert features is not None, "every recipe taps something"
        assert final is not None, "and the final state is tapped"
        known = torch.tensor([each is not None for each in found], device=states.device)
        return Reading(
            features=features.index_select(0, pairs.rows).to(self._dtype),
            embeddings=self._target.embedding(packed.tokens[pairs.rows + 1]).to(self._dtype),
            after=final.index_select(0, pairs.rows + 1),
            reused=known[packed.sequence[pairs.rows]],
        )

    def _looked_up(self, packed: PackedSequences) -> list[Tensor | None]:
        """Ask for each sequence."""
        if self._lookup is None:
            return [None] * packed.num_sequences
        tokens, learned = packed.tokens.tolist(), packed.loss_mask.tolist()
        return [
            self._lookup(tokens[start:end], learned[start:end].count(0.0))
            for start, end in pairwise(packed.cu_seqlens)
        ]

    def _states(
        self, packed: PackedSequences, found: Sequence[Tensor | None]
    ) -> Float[Tensor, "tokens states"]:
        """Join what was recalled and what is computed, in the packed order."""
        spans = list(pairwise(packed.cu_seqlens))
        lengths = [b - a for (a, b), rows in zip(spans, found, strict=True) if rows is None]
        if not lengths:
            return torch.cat([rows for rows in found if rows is not None])
        missing = torch.tensor([rows is None for rows in found], device=packed.tokens.device)
        chosen = missing[packed.sequence]
        attention = PackedAttention((0, *accumulate(lengths)))
        computed = self._target.forward_with_features(
            packed.tokens[chosen], packed.positions[chosen], attention, self._taps
        ).features
        assert computed is not None, "the final state is tapped"
        if len(lengths) == len(found):
            return computed
        parts = iter(torch.split(computed, lengths))
        return torch.cat([next(parts) if rows is None else rows for rows in found])
