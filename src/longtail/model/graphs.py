"""Forward passes captured as CUDA graphs, by their number of tokens, and replayed.

Launching the kernels of a step one by one takes longer than the step. A captured pass is launched
at once, but its shapes and addresses are fixed: inputs are copied into static buffers, and counts
are rounded up, so that a few dozen graphs are enough.

    counts    1 2 3 4 5 .. 8 9 .. 16 17 .. 24 ...     a step of 20 tokens, decoding 20 requests or
    sizes     1 2 4 4 8    8 16   16 24   24          verifying 4 drafts of 4, uses the graph of 24

All graphs of a device share one memory pool, for decoding, verification and drafts. They are
captured when first needed. One runs at a time; its outputs are valid until the next one runs.
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
"""Largest pass that is captured; larger ones keep the device busy without a graph."""


def graph_size(count: int) -> int:
    """Round a number of tokens up: to a power of two up to 8, then to an eighth of the next one.

    Example: 3 -> 4, 9 -> 16, 20 -> 24, 65 -> 80, 129 -> 160
    """
    power = 1 << (count - 1).bit_length()
    step = max(8, power // 8) if power > 8 else power
    return -(-count // step) * step


class GraphBackend(abc.ABC):
    """Captures the kernels that a function launches."""

    @abc.abstractmethod
    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Return a function that replays `body`, and the output tensors.

        `body` may run once before it is captured; it must not wait for the device.
        """

    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Return the bytes of reserved device memory."""


@final
class CudaGraphs(GraphBackend):
    """CUDA graphs of one device in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._first: torch.cuda.CUDAGraph | None = None

    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Run once on a side stream, to compile kernels and allocate workspaces; then capture."""
        main, side = torch.cuda.current_stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            body()
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = body()
        # PyTorch refuses to capture into a pool whose graphs have all been freed.
        self._first = self._first or graph
        return graph.replay, outputs

    def reserved_bytes(self) -> int:
        """Return the memory reserved by PyTorch's allocator."""
        return torch.cuda.memory_reserved(self._device)


@final
class GraphPool:
    """All graphs of one device, and their memory."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self.num_graphs = 0
        """Number of captured graphs."""
        self.num_bytes = 0
        """Growth of the reserved memory by capturing, in bytes."""

    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Capture a pass; see `GraphBackend.capture`."""
        before = self._backend.reserved_bytes()
        captured = self._backend.capture(body)
        self.num_graphs += 1
        self.num_bytes += self._backend.reserved_bytes() - before
        return captured


@cache
def pool_of(device: torch.device) -> GraphPool:
    """Return the pool of a GPU, which all models share."""
    return GraphPool(CudaGraphs(device))


@final
class GraphedPass:
    """A function of tensors with one row per token, captured once for each rounded count.

    `padding` holds the padding row of each input; the padded rows of outputs are cut off. Without a
    pool, or with more than `max_tokens` rows, the function runs without a graph.
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
        self._key: Hashable = None

    def __call__(self, *inputs: Tensor, key: Hashable = None) -> Outputs:
        """Run on at least one row. The outputs are valid until the next pass of the pool.

        `key` stands for everything else that the function refers to, such as the address of a
        cache; when it changes, the graphs are captured again.
        """
        count = len(inputs[0])
        if self._pool is None or count > self._max_tokens:
            return self._function(*inputs)
        if key != self._key:
            self._captured.clear()
            self._key = key
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
