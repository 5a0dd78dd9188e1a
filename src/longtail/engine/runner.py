"""One step of arithmetic: a flat batch through the decoder, then a draw at every drawing token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.noise import NoiseAhead
from longtail.model.transformer import Taps, Transformer
from longtail.sampling import draw_rows
from longtail.speculation.tree import depths


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """What was drawn in a step, and the seconds its two parts took."""

    tokens: list[int]
    """For each drawing request in order: the draw at its last token, then at its draft's nodes."""
    logprobs: list[float]
    features: Float[Tensor, "tokens features"] | None
    """What the taps gave, of all flat tokens."""
    forward_s: float
    sample_s: float


class ModelRunner:
    """Runs batches on one set of weights."""

    def __init__(self, model: Transformer, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self.noise = NoiseAhead(model.config.vocab_size, model.device)

    @torch.inference_mode()
    def run(self, batch: FlatBatch, drawing: Sequence[Scheduled], taps: Taps) -> RunnerOutput:
        """Compute the batch and draw at every request of `drawing` and its draft, in order."""
        started = time.perf_counter()
        attention = self._kv.attention(batch)
        tapped = self._model.tapped(batch.tokens, batch.positions, attention, taps)
        hidden, features = tapped.hidden, tapped.features
        if not drawing:
            return RunnerOutput(
                tokens=[],
                logprobs=[],
                features=features,
                forward_s=time.perf_counter() - started,
                sample_s=0.0,
            )
        logits = self._model.logits(hidden if batch.drawing is None else hidden[batch.drawing])
        forwarded = time.perf_counter()
        noise = self.noise.rows(
            [each.active for each in drawing],
            [[0, *depths(each.draft.parents)] for each in drawing],
        )
        params = [
            each.active.request.sampling for each in drawing for _ in range(1 + each.draft.size)
        ]
        drawn = draw_rows(logits, noise, params)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        return RunnerOutput(
            tokens=tokens,
            logprobs=logprobs,
            features=features,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )
