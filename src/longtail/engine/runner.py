"""One step of arithmetic: a flat batch through the decoder, then a token drawn for each request."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import FlatBatch
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest
from longtail.model.transformer import Transformer
from longtail.sampling import draw_rows, gumbel_noise


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Tokens drawn in a step and the seconds its two parts took."""

    tokens: list[int]
    logprobs: list[float]
    forward_s: float
    sample_s: float


class ModelRunner:
    """Runs batches on one set of weights."""

    def __init__(self, model: Transformer, kv: KVCache) -> None:
        self._model, self._kv = model, kv
        self._noise = NoiseAhead(model.config.vocab_size, model.device)

    @torch.inference_mode()
    def run(self, batch: FlatBatch, drawing: Sequence[ActiveRequest]) -> RunnerOutput:
        """Compute the batch and draw one token for each request of `drawing`, in its order."""
        started = time.perf_counter()
        hidden = self._model(batch.tokens, batch.positions, self._kv.attention(batch))
        if not drawing:
            return RunnerOutput(
                tokens=[], logprobs=[], forward_s=time.perf_counter() - started, sample_s=0.0
            )
        logits = self._model.logits(hidden if batch.drawing is None else hidden[batch.drawing])
        forwarded = time.perf_counter()
        params = [active.request.sampling for active in drawing]
        drawn = draw_rows(logits, self._noise.rows(drawing), params)
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        return RunnerOutput(
            tokens=tokens,
            logprobs=logprobs,
            forward_s=forwarded - started,
            sample_s=time.perf_counter() - forwarded,
        )


class NoiseAhead:
    """Keyed noise of the next positions, made several at a time.

    The noise of a position is known before its token is, and a few large tensor operations cost
    less than many small ones. Values are those of `sampling.gumbel_noise`, whatever the grouping.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, max_entries: int = 2**18) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._max_entries = max_entries
        # By the request itself: another one may come back under the same name with another key.
        self._starts: dict[ActiveRequest, int] = {}
        self._rows: dict[ActiveRequest, int] = {}
        self._table = torch.empty(0, 0, vocab_size, device=device)

    def rows(self, drawing: Sequence[ActiveRequest]) -> Float[Tensor, "drawing vocab"]:
        """Noise for the next token of each request."""
        offsets = [self._offset(active) for active in drawing]
        if not all(0 <= offset < self._table.shape[1] for offset in offsets):
            self._refill(drawing)
            offsets = [0] * len(drawing)
        rows = [self._rows[active] for active in drawing]
        return self._table[
            torch.tensor(rows, device=self._device), torch.tensor(offsets, device=self._device)
        ]

    def _offset(self, active: ActiveRequest) -> int:
        """Column of the request's next position in the table; -1 if it has no row."""
        start = self._starts.get(active)
        return -1 if start is None else len(active.tokens) - start

    def _refill(self, drawing: Sequence[ActiveRequest]) -> None:
        """Start every request's window at its next position."""
        count = len(drawing)
        depth = max(1, min(32, self._max_entries // (count * self._vocab_size)))
        keys = torch.tensor([active.request.noise_key for active in drawing], device=self._device)
        starts = [len(active.tokens) for active in drawing]
        positions = torch.tensor(starts, device=self._device)[:, None] + torch.arange(
            depth, device=self._device
        )
        noise = gumbel_noise(keys.repeat_interleave(depth), positions.flatten(), self._vocab_size)
        self._table = noise.view(count, depth, self._vocab_size)
        self._rows = {active: row for row, active in enumerate(drawing)}
        self._starts = dict(zip(drawing, starts, strict=True))
