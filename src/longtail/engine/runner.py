"""Runs a flat batch through the decoder and draws a token wherever one is needed.

Noise is keyed, and hashed where it is added.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest
from longtail.model.kernels.draws import select_draws
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn, draw_rows, gumbel_noise
from longtail.speculation.drafter import Noise, Taps
from longtail.speculation.tree import depths


@final
class Sampler:
    """Draws the tokens of a step, and gives drafters the noise of positions without a token yet.

    A native kernel hashes the noise; without one, and in float64, PyTorch's operations do.
    """

    def __init__(self, model: Transformer) -> None:
        self._vocab_size, self._draws = model.config.vocab_size, select_draws(model.dtype)

    def for_drafts(self, requests: Sequence[ActiveRequest]) -> Noise:
        """Return noise for drafts, valid until the requests' next tokens."""
        keys = [active.request.noise_key for active in requests]
        return Noise(keys, [len(active.tokens) for active in requests], self._vocab_size)

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw after the last token of every request, and after every node of its draft.

        Each row has its own noise and parameters.
        """
        keys, positions, params = [], [], []
        for each in drawing:
            request, offsets = each.active.request, [0, *depths(each.draft.parents)]
            keys += [request.noise_key] * len(offsets)
            positions += [len(each.active.tokens) + offset for offset in offsets]
            params += [request.sampling] * len(offsets)
        if self._draws is not None:
            return self._draws.draw_rows(logits, keys, positions, params)
        row_keys, places = torch.tensor([keys, positions])
        return draw_rows(logits, gumbel_noise(row_keys, places, self._vocab_size), params)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Draws of a step, and the seconds of its two parts."""

    tokens: list[int]
    """Draws of each drawing request in order: at its last token, then at its draft's nodes."""
    logprobs: list[float]
    features: Float[Tensor, "tokens features"] | None
    """Features of all flat tokens."""
    forward_s: float
    sample_s: float


class ModelRunner:
    """Runs batches on one model and one cache."""

    def __init__(self, model: Transformer, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self.sampler = Sampler(model)

    @torch.inference_mode()
    def run(self, batch: FlatBatch, drawing: Sequence[Scheduled], taps: Taps) -> RunnerOutput:
        """Compute the batch; draw for each request of `drawing` and its draft, in order."""
        started = time.perf_counter()
        logits, features = self._forward(batch, taps)
        forwarded = time.perf_counter()
        drawn = None if logits is None else self.sampler.draw(logits, drawing)
        return RunnerOutput(
            tokens=[] if drawn is None else drawn.tokens.tolist(),
            logprobs=[] if drawn is None else drawn.logprobs.tolist(),
            features=features,
            forward_s=forwarded - started,
            sample_s=0.0 if drawn is None else time.perf_counter() - forwarded,
        )

    def _forward(
        self, batch: FlatBatch, taps: Taps
    ) -> tuple[Float[Tensor, "drawing vocab"] | None, Float[Tensor, "tokens features"] | None]:
        """Return the logits of all tokens that draw, if any, and the features of all tokens."""
        attention = self._kv.attention(batch)
        hidden, features = self._model.forward_with_features(
            batch.tokens, batch.positions, attention, taps
        )
        hidden = hidden if batch.drawing is None else hidden[batch.drawing]
        return self._model.logits(hidden) if len(hidden) else None, features
