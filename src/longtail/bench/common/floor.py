"""A lower bound of a decode step: a bare loop over its matrix products, nothing else.

    for each layer:   qkv   (q K^T, p V)   output   gate_up   down          then the LM head

Products with weights are the model's own packed layers. Attention runs over a contiguous cache of
one context length in the fastest of several implementations. Left out: embedding, norms, rotary
positions, activations, residuals, storing keys and values, sampling, scheduling.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from longtail.model.kernels.choice import select_kernels
from longtail.model.kernels.ops import text_places
from longtail.model.transformer import DecoderLayer, ModelConfig, Transformer

Rows = Float[Tensor, "rows row_len kv_heads head_dim"]
Heads = Float[Tensor, "rows heads head_dim"]
Attend = Callable[[Heads, Rows, Rows], Heads]
"""Attention of one query per row to all keys and values of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorTime:
    """Seconds per step.

    Example: FloorTime(step_s=0.03, step_cpu_s=0.03, linear_s=0.027, attention="sdpa")
    """

    step_s: float
    step_cpu_s: float
    """Below `step_s` when something else had the core."""
    linear_s: float
    """Seconds of the products with weights."""
    attention: str
    """Name of the fastest implementation of attention."""


@final
class Floor:
    """Matrix products of decode steps of `rows` requests with `context` tokens each."""

    def __init__(self, model: Transformer, *, rows: int, context: int) -> None:
        """Make inputs and caches; the model must be packed."""
        config = model.config
        self._layers = [_products(layer) for layer in model.layers]
        self._head = model.head.forward
        self._ways = attention_ways(config, model.dtype, rows=rows, context=context)
        make = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make).to(model.dtype)

        width = config.num_heads * config.head_dim
        self._hidden = draw(rows, config.hidden_size)
        self._inner = draw(rows, config.intermediate_size)
        self._attended = draw(rows, width)
        self._queries = draw(rows, config.num_heads, config.head_dim)
        row = (rows, context, config.num_kv_heads, config.head_dim)
        self._caches = [(draw(*row), draw(*row)) for _ in self._layers]
        with torch.inference_mode():
            self._fastest = self._choose()

    @torch.inference_mode()
    def measure(self, steps: int) -> FloorTime:
        """Run `steps` steps and return the mean time of one."""
        attend = self._ways[self._fastest]
        attention_s = 0.0
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            attention_s += self._step(attend)
        total_s, total_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
        return FloorTime(
            step_s=total_s / steps,
            step_cpu_s=total_cpu_s / steps,
            linear_s=(total_s - attention_s) / steps,
            attention=self._fastest,
        )

    def _step(self, attend: Attend) -> float:
        """Run one step and return the seconds of attention."""
        clock, attention_s = time.perf_counter, 0.0
        for (qkv, output, gate_up, down), (keys, values) in zip(
            self._layers, self._caches, strict=True
        ):
            qkv(self._hidden)
            start = clock()
            attend(self._queries, keys, values)
            attention_s += clock() - start
            output(self._attended)
            gate_up(self._hidden)
            down(self._inner)
        self._head(self._hidden)
        return attention_s

    def _choose(self) -> str:
        """Run all implementations of attention in turns; return the one with the fastest turn."""
        best = dict.fromkeys(self._ways, float("inf"))
        for _ in range(5):
            for name, attend in self._ways.items():
                start = time.perf_counter()
                for keys, values in self._caches:
                    attend(self._queries, keys, values)
                best[name] = min(best[name], time.perf_counter() - start)
        return min(best, key=lambda name: best[name])


def attention_ways(
    config: ModelConfig, dtype: torch.dtype, *, rows: int, context: int
) -> dict[str, Attend]:
    """Return implementations of attention to `context` keys, by name; all agree."""
    kernels = select_kernels(dtype, torch.device("cpu"), config.head_dim)
    places = text_places(torch.arange(rows), torch.full((rows,), context - 1))

    def sdpa(queries: Heads, keys: Rows, values: Rows) -> Heads:
        out = F.scaled_dot_product_attention(
            queries[:, :, None], keys.transpose(1, 2), values.transpose(1, 2), enable_gqa=True
        )
        return out[:, :, 0]

    def sdpa_grouped(queries: Heads, keys: Rows, values: Rows) -> Heads:
        # the heads of a group are queries of their one key head
        grouped = queries.view(rows, keys.shape[2], -1, queries.shape[2])
        out = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2))
        return out.view(queries.shape)

    def kernel(queries: Heads, keys: Rows, values: Rows) -> Heads:
        return kernels.attend_rows(queries, keys, values, places, 0)

    return {"sdpa": sdpa, "sdpa, heads grouped": sdpa_grouped, "engine's kernel": kernel}


def _products(layer: torch.nn.Module) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return the four products of a layer, without nn.Module's call hooks."""
    assert isinstance(layer, DecoderLayer)
    attention, feed_forward = layer.attention, layer.feed_forward
    linears = (attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down)
    return tuple(linear.forward for linear in linears)
