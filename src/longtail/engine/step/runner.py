"""The model runner: a flat batch through the decoder, then a draw at every drawing token.

    launch --- the host is free while a GPU computes --- wait

On a GPU everything is launched without waiting: inputs of the draws are copied asynchronously
(`transfer`), and so are the results. On a CPU `launch` computes the step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv.cache import KVCache
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.engine.step.graphs import StepGraphs
from longtail.engine.step.sampler import make_sampler
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn
from longtail.speculation.taps import Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Draws of a step, and the seconds of its two parts."""

    tokens: list[int]
    """Draws of each drawing request in order: at its last token, then at its draft's nodes."""
    logprobs: list[float]
    features: Float[Tensor, "tokens features"] | None
    """Features of all flat tokens."""
    forward_s: float
    """On a GPU: seconds of launching all but the draws, and of waiting for the results."""
    sample_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launched step."""

    drawn: Drawn | None
    """Draws on the host, valid when the step is done; None if no token draws."""
    features: Float[Tensor, "tokens features"] | None
    forward_s: float
    sample_s: float
    done: torch.cuda.Event | None
    """Event of the GPU at the end of the step; None: the step is done."""

    @property
    def is_running(self) -> bool:
        """Whether a GPU computes the step while the host is free."""
        return self.done is not None

    def wait(self) -> RunnerOutput:
        """Wait for the results; the host waits for a GPU only here."""
        began = time.perf_counter()
        if self.done is not None:
            self.done.synchronize()
        return RunnerOutput(
            tokens=[] if self.drawn is None else self.drawn.tokens.tolist(),
            logprobs=[] if self.drawn is None else self.drawn.logprobs.tolist(),
            features=self.features,
            forward_s=self.forward_s + time.perf_counter() - began,
            sample_s=self.sample_s,
        )


class ModelRunner:
    """Runs batches on one model and one cache."""

    def __init__(self, model: Transformer, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self._graphs = None
        if model.graphs is not None and isinstance(kv, PagedKVCache):
            self._graphs = StepGraphs(model, kv, model.graphs)
        self.sampler = make_sampler(model)

    @torch.inference_mode()
    def launch(self, batch: FlatBatch, drawing: Sequence[Scheduled], taps: Taps) -> Launched:
        """Compute the batch; draw for each request of `drawing` and its draft, in order."""
        started = time.perf_counter()
        logits, features = self._forward(batch, taps)
        forwarded = time.perf_counter()
        drawn, device = None, self._model.device
        if logits is not None:
            draws = self.sampler.draw(logits, drawing)
            # Two copies into pinned memory with one event: one copy would need another launch.
            drawn = Drawn(
                tokens=draws.tokens.to("cpu", non_blocking=True),
                logprobs=draws.logprobs.to("cpu", non_blocking=True),
            )
        done = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        return Launched(
            drawn=drawn,
            features=features,
            forward_s=forwarded - started,
            sample_s=0.0 if logits is None else time.perf_counter() - forwarded,
            done=done,
        )

    def _forward(
        self, batch: FlatBatch, taps: Taps
    ) -> tuple[Float[Tensor, "drawing vocab"] | None, Float[Tensor, "tokens features"] | None]:
        """Return the logits of all tokens that draw, if any, and the features of all tokens."""
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch, taps)
        attention = self._kv.attention(batch)
        tapped = self._model.forward_with_features(batch.tokens, batch.positions, attention, taps)
        hidden = tapped.hidden if batch.drawing is None else tapped.hidden[batch.drawing]
        return self._model.logits(hidden) if len(hidden) else None, tapped.features
