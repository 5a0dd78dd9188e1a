"""Forward passes captured as graphs and replayed, keyed by how many tokens they compute.

Launching the kernels of a step one by one takes longer than the step. A captured pass is launched
at once, but its shapes and addresses are fixed: inputs are copied into static buffers, and counts
are rounded up, so that a few dozen graphs serve all.

    counts    1 2 3 4 5 .. 8 9 .. 16 17 .. 24 ...     a step of 20 tokens, decoding 20 requests or
    sizes     1 2 4 4 8    8 16   16 24   24          verifying 4 drafts of 4, is the graph of 24

All graphs of a device share one memory pool: decoding, verification and drafts, whatever the
strategy and whichever model drafts. They are captured when first needed. Only one runs at a time,
and what it returns is good until the next one runs.
"""

import abc
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import final

import torch
from jaxtyping import Shaped
from torch import Tensor

Outputs = tuple[Tensor, ...]

MAX_TOKENS = 512
"""Larger passes keep the device busy without a graph."""


def graph_size(count: int) -> int:
    """Round a count of tokens up: to powers of two to 8, then to an eighth of the next one.

    Example: 3 -> 4, 9 -> 16, 20 -> 24, 65 -> 80, 129 -> 160
    """
    power = 1 << (count - 1).bit_length()
    step = max(8, power // 8) if power > 8 else power
    return -(-count // step) * step


class GraphBackend(abc.ABC):
    """Records what a function launches."""

    @abc.abstractmethod
    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Return a replay of `body` and the tensors that it fills.

        `body` may be run for its effects before it is recorded; it must not wait for the device.
        """

    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Return the device memory that is reserved now."""


@final
class CudaGraphs(GraphBackend):
    """CUDA graphs of one device, all in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run once on the side, so that kernels are compiled and workspaces there; then record."""
        main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            body()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = body()
        # PyTorch refuses to capture into a pool whose graphs are all gone.
        self._first = self._first or graph
        return graph.replay, outputs

    def reserved_bytes(self) -> int:
        """Ask PyTorch's allocator."""
        return torch.cuda.memory_reserved(self._device)


@final
class GraphPool:
    """All graphs of one device, and what they take."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self.num_graphs = 0
        """Captured so far."""
        self.num_bytes = 0
        """By which capturing has made the reserved memory grow."""

    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Capture one more pass."""
        before = self._backend.reserved_bytes()
        captured = self._backend.capture(body)
        self.num_graphs += 1
        self.num_bytes += self._backend.reserved_bytes() - before
        return captured


@cache
def pool_of(device: torch.device) -> GraphPool:
    """Return the one pool of a GPU, whichever models share it."""
    return GraphPool(CudaGraphs(device))


@final
class GraphedPass:
    """One function of tensors with a row a token, captured once for each rounded count.

    `padding` has the row that fills each input up; rows of outputs behind the count are cut off.
    Without a pool, or with more than `max_tokens` rows, the function runs as it is.
    """

    def __init__(
        self,
        pool: GraphPool | None,
        function: Callable[..., Outputs],
        padding: Sequence[Shaped[Tensor, "..."]],
        *,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._pool, self._function, self._padding = pool, function, padding
        self._max_tokens = max_tokens
        size = 0 if pool is None else graph_size(max_tokens)
        self._buffers = [row.expand(size, *row.shape).clone() for row in padding]
        self._captured: dict[int, tuple[Callable[[], None], Outputs]] = {}
        self._about: Hashable = None

    def __call__(self, *inputs: Tensor, about: Hashable = None) -> Outputs:
        """Run on at least one row; good until the next pass of the pool.

        `about` names all else that the function refers to: when it changes, graphs are made anew.
        """
        count = len(inputs[0])
        if self._pool is None or count > self._max_tokens:
            return self._function(*inputs)
        if about != self._about:
            self._captured.clear()
            self._about = about
        size = graph_size(count)
        for buffer, rows, padding in zip(self._buffers, inputs, self._padding, strict=True):
            buffer[:count] = rows
            buffer[count:size] = padding
        if size not in self._captured:
            views = [buffer[:size] for buffer in self._buffers]
            self._captured[size] = self._pool.capture(lambda: self._function(*views))
        replay, outputs = self._captured[size]
        replay()
        return tuple(out[:count] for out in outputs)
