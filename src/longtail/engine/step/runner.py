"""One step of arithmetic: a flat batch through the decoder, then a draw at every drawing token.

    launch --- the host is free, as long as a GPU computes --- wait

A GPU is told everything before it has computed anything: what the draws need is sent without
waiting for what is under way (`transfer`), and the results come home by themselves. On a CPU a step
is computed when it has been launched.
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
    """What was drawn in a step, and the seconds of its two parts."""

    tokens: list[int]
    """For each drawing request in order: the draw at its last token, then at its draft's nodes."""
    logprobs: list[float]
    features: Float[Tensor, "tokens features"] | None
    """What the taps gave, of all flat tokens."""
    forward_s: float
    """On a GPU: launching everything but the draws, and waiting for the results."""
    sample_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A step that was launched."""

    drawn: Drawn | None
    """On the host, not to be read before the step is done; None where nobody draws."""
    features: Float[Tensor, "tokens features"] | None
    forward_s: float
    sample_s: float
    done: torch.cuda.Event | None
    """When a GPU has computed it; None: it is computed."""

    @property
    def is_under_way(self) -> bool:
        """Tell whether somebody else computes it, so that the host's time is its own."""
        return self.done is not None

    def wait(self) -> RunnerOutput:
        """Wait for the results: the only place in which the host waits for a GPU's step."""
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
    """Runs batches on one set of weights."""

    def __init__(self, model: Transformer, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self._graphs = None
        if model.graphs is not None and isinstance(kv, PagedKVCache):
            self._graphs = StepGraphs(model, kv, model.graphs)
        self.sampler = make_sampler(model)

    @torch.inference_mode()
    def launch(self, batch: FlatBatch, drawing: Sequence[Scheduled], taps: Taps) -> Launched:
        """Compute the batch and draw at every request of `drawing` and its draft, in order."""
        started = time.perf_counter()
        logits, features = self._forward(batch, taps)
        forwarded = time.perf_counter()
        drawn, device = None, self._model.device
        if logits is not None:
            there = self.sampler.draw(logits, drawing)
            # Two copies into pinned memory, waited for as one: to join them is no less to launch.
            drawn = Drawn(
                tokens=there.tokens.to("cpu", non_blocking=True),
                logprobs=there.logprobs.to("cpu", non_blocking=True),
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
        """Return the logits of all tokens that draw, if any, and what the taps gave of all."""
        if self._graphs is not None and self._graphs.fits(batch):
            return self._graphs.run(batch, taps)
        attention = self._kv.attention(batch)
        tapped = self._model.forward_with_features(batch.tokens, batch.positions, attention, taps)
        hidden = tapped.hidden if batch.drawing is None else tapped.hidden[batch.drawing]
        return self._model.logits(hidden) if len(hidden) else None, tapped.features
