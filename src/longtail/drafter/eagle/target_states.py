"""The target's states of packed sequences: looked up where an engine kept them, else computed.

A state follows from the weights and the tokens before it, so both ways give the same states; a
window's are looked up with the tokens before it, and computed without.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from longtail.drafter.eagle.unroll import Pairs
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Taps
from longtail.types import PackedSequences

_FINAL = Taps(final=True)


def training_taps(recipe: Taps) -> Taps:
    """Return the states that training reads: the recipe's features, and the head's input."""
    return recipe.union(_FINAL)


def never() -> bool:
    """Return False: nothing stops."""
    return False


class Interrupted(Exception):  # noqa: N818 - not an error: a stop was asked for
    """A micro-batch was stopped, between two layers of the target or in `TargetReader.check`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The target's states of pairs."""

    features: Float[Tensor, "pairs features"]
    """Features of the first token."""
    embeddings: Float[Tensor, "pairs hidden"]
    """Embeddings of the second token."""
    after: Float[Tensor, "pairs hidden"]
    """Final states at the second token, from which the head predicts the token after the pair."""
    reused: Bool[Tensor, "pairs"]
    """Whether the states were looked up."""


@final
class TargetReader:
    """Reads a target for a drafter of its shape, and never writes it."""

    def __init__(self, target: Transformer, dtype: torch.dtype, taps: Taps) -> None:
        self._target, self._dtype = target, dtype
        self._recipe, self._taps = taps, training_taps(taps)
        self.found: Mapping[tuple[int, ...], Tensor] = {}
        """States of sequences that an engine kept, by their tokens; the last row is never read."""
        self._stopped: Callable[[], bool] = never

    @contextmanager
    def interrupted_by(self, stopped: Callable[[], bool]) -> Iterator[None]:
        """Raise Interrupted in `check` and before a layer of the target, if `stopped` is True."""
        self._stopped = stopped
        try:
            with ExitStack() as hooks:
                for layer in self._target.layers:
                    hooks.callback(layer.register_forward_pre_hook(self.check).remove)
                yield
        finally:
            self._stopped = never

    def check(self, *_: object) -> None:
        """Raise Interrupted if a stop was asked for; outside of `interrupted_by` it never was."""
        if self._stopped():
            raise Interrupted

    @torch.no_grad()
    def read(self, packed: PackedSequences, pairs: Pairs) -> Reading:
        """Return the states of all pairs; `packed` is on the target's device."""
        states, found = self.states(packed)
        features, final = (self._taps.pick(taps, states) for taps in (self._recipe, _FINAL))
        assert features is not None, "every recipe taps something"
        assert final is not None, "the final state is tapped"
        return Reading(
            features=features.index_select(0, pairs.rows).to(self._dtype),
            embeddings=self._target.embedding(packed.tokens[pairs.rows + 1]).to(self._dtype),
            after=final.index_select(0, pairs.rows + 1),
            reused=found[packed.sequence[pairs.rows]],
        )

    @torch.no_grad()
    def states(
        self, packed: PackedSequences
    ) -> tuple[Float[Tensor, "tokens states"], Bool[Tensor, "sequences"]]:
        """Return the states of all tokens, and whether those of a sequence were looked up."""
        tokens = packed.tokens.tolist()
        sequences = [tuple(tokens[start:end]) for start, end in pairwise(packed.cu_seqlens)]
        rows = [self.found.get(sequence) for sequence in sequences]
        found = torch.tensor([each is not None for each in rows], device=packed.tokens.device)
        lengths = [len(each) for each, row in zip(sequences, rows, strict=True) if row is None]
        if not lengths:
            return torch.cat([each for each in rows if each is not None]), found
        chosen = ~found[packed.sequence]
        attention = PackedAttention((0, *accumulate(lengths)))
        _, computed = self._target.forward_with_features(
            packed.tokens[chosen], packed.positions[chosen], attention, self._taps
        )
        assert computed is not None, "the final state is tapped"
        if len(lengths) == len(sequences):
            return computed, found
        parts = iter(torch.split(computed, lengths))
        return torch.cat([next(parts) if each is None else each for each in rows]), found
