"""The model runner: a flat batch through the decoder, then a draw at every drawing token.

    launch --- the host is free while a GPU computes --- wait

On a GPU everything is launched without waiting: inputs of the draws are copied asynchronously
(`transfer`), and so are the results. On a CPU `launch` computes the step.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv.cache import KVCache
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.engine.step.sampler import make_sampler
from longtail.model.graphs import MAX_TOKENS, GraphedPass, GraphPool
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn
from longtail.speculation.drafter import Drafter, Taps


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


class StepSeconds(TypedDict):
    """Seconds of one step, under the names that `StepReport` gives them."""

    step_s: float
    forward_s: float
    sample_s: float
    gap_s: float
    draft_s: float
    draft_forward_s: float
    tuner_s: float


class StepClock:
    """The clock of the tuner's inputs; tests replace it."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter()

    def read(self) -> float:
        """Return the seconds since the step began."""
        return time.perf_counter() - self._began


@final
class Stopwatch:
    """Context manager that sums the seconds spent inside it."""

    __slots__ = ("_entered", "seconds")

    def __init__(self) -> None:
        self.seconds = self._entered = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._entered


@final
class StepTimer:
    """Stopwatches of one step; `start` resets them for the next one.

        schedule | draft | flatten | launch, feedback, wait | accept | append | record
                   draft             compute (feedback: draft) draft             draft

    Time of `noise` and `tuner` is part of the time of `draft`, and reported separately.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.draft, self.compute = Stopwatch(), Stopwatch()
        self.noise, self.tuner = Stopwatch(), Stopwatch()
        self._drafters = drafters
        self._started = self._forward_before = 0.0

    def start(self) -> None:
        """Begin a step."""
        self.draft.seconds = self.compute.seconds = 0.0
        self.noise.seconds = self.tuner.seconds = 0.0
        self._forward_before = sum(drafter.forward_s for drafter in self._drafters)
        self._started = time.perf_counter()

    def stop(self, *, forward_s: float, sample_s: float) -> StepSeconds:
        """Return the seconds of the step, given those that the model runner measured."""
        step_s = time.perf_counter() - self._started
        forwards_s = sum((each.forward_s for each in self._drafters), 0.0) - self._forward_before
        noise_s, tuner_s = self.noise.seconds, self.tuner.seconds
        return {
            "step_s": step_s,
            "forward_s": forward_s,
            "sample_s": sample_s + noise_s,
            "gap_s": step_s - self.compute.seconds - forwards_s,
            "draft_s": self.draft.seconds - noise_s - tuner_s if self._drafters else 0.0,
            "draft_forward_s": forwards_s,
            "tuner_s": tuner_s,
        }
