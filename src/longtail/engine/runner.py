"""One step of arithmetic: a flat batch through the decoder, then a draw at every drawing token."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.paged_cache import PagedKVCache
from longtail.engine.sampler import make_sampler
from longtail.engine.step_graphs import StepGraphs
from longtail.model.transformer import Taps, Transformer


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
        self._graphs = None
        if model.graphs is not None and isinstance(kv, PagedKVCache):
            self._graphs = StepGraphs(model, kv, model.graphs)
        self.sampler = make_sampler(model)

    @torch.inference_mode()
    def run(self, batch: FlatBatch, drawing: Sequence[Scheduled], taps: Taps) -> RunnerOutput:
        """Compute the batch and draw at every request of `drawing` and its draft, in order."""
        started = time.perf_counter()
        logits, features = self._forward(batch, taps)
        if logits is None:
            return RunnerOutput(
                tokens=[],
                logprobs=[],
                features=features,
                forward_s=time.perf_counter() - started,
                sample_s=0.0,
            )
        forwarded = time.perf_counter()
        drawn = self.sampler.draw(logits, drawing)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        return RunnerOutput(
            tokens=tokens,
            logprobs=logprobs,
            features=features,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )

    def _forward(
        self, batch: FlatBatch, taps: Taps
    ) -> tuple[Float[Tensor, "drawing vocab"] | None, Float[Tensor, "tokens features"] | None]:
        """Return the logits of all tokens that draw, if any, and what the taps gave of all."""
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch, taps)
        attention = self._kv.attention(batch)
        tapped = self._model.tapped(batch.tokens, batch.positions, attention, taps)
        hidden = tapped.hidden if batch.drawing is None else tapped.hidden[batch.drawing]
        return self._model.logits(hidden) if len(hidden) else None, tapped.features
