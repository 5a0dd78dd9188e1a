"""CUDA graphs simulated on a CPU: the operations of a pass are recorded and replayed.

As on a GPU, a replay repeats operations on the same memory: Python's decisions during the capture
are fixed, inputs and outputs keep their addresses, and no value may be read. The results of the
capture itself are erased.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtail.model.graphs import GraphBackend, Outputs

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], list[torch.Tensor]]


def tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in func.__name__, "a captured pass asked for a value"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, tensors(out)))
        return out

    def replay(self) -> None:
        for func, args, kwargs, kept in self.calls:
            again = tensors(func(*args, **kwargs))
            for out, new in zip(kept, again, strict=True):
                if out.data_ptr() != new.data_ptr():
                    out.copy_(new)


class FakeGraphs(GraphBackend):
    """A backend that counts captures and replays; each capture takes a kilobyte."""

    def __init__(self) -> None:
        self.num_captures = self.num_replays = 0

    def capture(self, body: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        body()
        recorder = Recorder()
        with recorder:
            outputs = body()
        for out in outputs:
            out.fill_(torch.nan)
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            recorder.replay()

        return replay, outputs

    def reserved_bytes(self) -> int:
        return 1024 * self.num_captures
