"""Roofline: the most tokens per second, from the time to read weights and the time per row.

A step reads all weights once and multiplies each of its rows with them (roofline, Williams et al.
2009): seconds(rows) = max(read_s, rows * row_s). Rows are free while reading takes longer, and
drafted tokens are rows: a step of `running` completions gains from drafts while
running * accept length is below the number of free rows.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from longtail.model.size import count_parameters
from longtail.model.transformer import ModelConfig
from longtail.system.device import multiplies_bfloat16, now

_SIDE, _BYTES = 2048, 2**28
_MEASURED_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Speed of a processor: products of large matrices, and reading of memory."""

    flop_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Least seconds of a step, without reading of keys and values."""

    read_s: float
    """Seconds to read all weights that products use."""
    row_s: float
    """Seconds of the products of a row."""

    def seconds(self, rows: int) -> float:
        """Return the least seconds of a step."""
        return max(self.read_s, rows * self.row_s)

    def tokens_per_s(self, running: int) -> float:
        """Return the most tokens per second of plain decoding."""
        return running / self.seconds(running)

    @property
    def free_rows(self) -> float:
        """Rows up to which a step takes no longer than one of a single row."""
        return max(self.read_s / self.row_s, 1.0)

    def gain(self, running: int) -> float:
        """Return the most that drafts can gain, however many of their tokens are accepted."""
        return max(self.free_rows / running, 1.0)

    def sentence(self, running: int) -> str:
        """Return what drafts can gain with that many completions running, and in the tail."""
        gains = ", ".join(f"{self.gain(n):.1f}x with {n}" for n in sorted({running, 4, 1})[::-1])
        return f"{self.free_rows:.0f} rows of a step are free: drafts gain at most {gains} running"


def limit_of(shape: ModelConfig, dtype: torch.dtype, speed: Machine) -> Limit:
    """Return the limit of a decoder; its embedding is not multiplied unless it is the head."""
    embedding = shape.vocab_size * shape.hidden_size
    count = count_parameters(shape) - (0 if shape.tied_embeddings else embedding)
    return Limit(
        read_s=count * dtype.itemsize / speed.bytes_per_s, row_s=2 * count / speed.flop_per_s
    )


def measure(device: torch.device, dtype: torch.dtype) -> Machine:
    """Measure a device with this process's threads, in about a second.

    Products are of float32 where the device only emulates those of bfloat16.
    """
    in_dtype = dtype if multiplies_bfloat16(device) else torch.float32
    square = torch.ones(_SIDE, _SIDE, dtype=in_dtype, device=device)
    halves = torch.ones(2, _BYTES // 8, device=device)
    return Machine(
        flop_per_s=2 * _SIDE**3 / _least_s(lambda: square @ square, device),
        bytes_per_s=_BYTES / _least_s(lambda: torch.dot(*halves), device),
    )


def _least_s(work: Callable[[], object], device: torch.device) -> float:
    work()
    least, end = float("inf"), now(device) + _MEASURED_S
    while (began := now(device)) < end:
        work()
        least = min(least, now(device) - began)
    return least
