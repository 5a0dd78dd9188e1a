"""Steps in which every token draws, as captured passes: decoding and verification alike.

Steps that prefill are long, vary in shape and are worth their launches; they run as they are.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.model.graphs import MAX_TOKENS, GraphedPass, GraphPool
from longtail.model.transformer import Transformer
from longtail.speculation.taps import Taps


@final
class StepGraphs:
    """The captured passes of one model over one cache, by what is tapped."""

    def __init__(self, model: Transformer, kv: PagedKVCache, pool: GraphPool) -> None:
        self._model, self._kv, self._pool = model, kv, pool
        self._passes: dict[Taps, GraphedPass] = {}

    def fits(self, batch: FlatBatch) -> bool:
        """Tell whether the step is one of those that are captured."""
        return (
            batch.drawing is None and len(batch.tokens) <= MAX_TOKENS and self._kv.is_short(batch)
        )

    def run(
        self, batch: FlatBatch, taps: Taps
    ) -> tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens features"] | None]:
        """Return logits, good until the next pass, and what the taps gave."""
        if taps not in self._passes:
            self._passes[taps] = self._make(taps)
        numbers = torch.stack((batch.tokens, batch.positions, *self._kv.numbers(batch)), 1)
        self._kv.tables()  # as it is now; the pass reads it where it lies
        logits, *features = self._passes[taps](numbers, key=self._kv.address)
        return logits, features[0].clone() if features else None  # drafters read them later

    def _make(self, taps: Taps) -> GraphedPass:
        def compute(numbers: Tensor) -> tuple[Tensor, ...]:
            tokens, positions, *places = numbers.T.contiguous()
            attention = self._kv.attention_at(places)
            tapped = self._model.forward_with_features(tokens, positions, attention, taps)
            logits = self._model.logits(tapped.hidden)
            return (logits,) if tapped.features is None else (logits, tapped.features)

        nobody = torch.tensor([0, 0, *self._kv.padding()], device=self._model.device)
        return GraphedPass(self._pool, compute, [nobody])
