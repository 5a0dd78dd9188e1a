"""Captured passes (CUDA graphs) for steps in which every token draws: decode and verification.

Steps with prefill are long and vary in shape; they run without capture.
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
    """Captured passes of one model and one cache, by taps."""

    def __init__(self, model: Transformer, kv: PagedKVCache, pool: GraphPool) -> None:
        self._model, self._kv, self._pool = model, kv, pool
        self._passes: dict[Taps, GraphedPass] = {}

    def fits(self, batch: FlatBatch) -> bool:
        """Return whether a captured pass can run the step."""
        return (
            batch.drawing is None and len(batch.tokens) <= MAX_TOKENS and self._kv.is_short(batch)
        )

    def run(
        self, batch: FlatBatch, taps: Taps
    ) -> tuple[Float[Tensor, "tokens vocab"], Float[Tensor, "tokens features"] | None]:
        """Return logits, valid until the next pass, and features."""
        if taps not in self._passes:
            self._passes[taps] = self._make(taps)
        numbers = torch.stack((batch.tokens, batch.positions, *self._kv.numbers(batch)), 1)
        self._kv.tables()  # updates the table that the pass reads
        logits, *features = self._passes[taps](numbers, key=self._kv.address)
        return logits, features[0].clone() if features else None  # read after the next pass

    def _make(self, taps: Taps) -> GraphedPass:
        def compute(numbers: Tensor) -> tuple[Tensor, ...]:
            tokens, positions, *places = numbers.T.contiguous()
            attention = self._kv.attention_at(places)
            tapped = self._model.forward_with_features(tokens, positions, attention, taps)
            logits = self._model.logits(tapped.hidden)
            return (logits,) if tapped.features is None else (logits, tapped.features)

        padding = torch.tensor([0, 0, *self._kv.padding()], device=self._model.device)
        return GraphedPass(self._pool, compute, [padding])
