"""The processes of a job that `accelerate launch` started, and the sums that they keep together.

Sums are counters of the job's own key-value store, so a process adds and reads them at any time,
while the others generate. Tensors go through the default process group.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_MICRO = 1e6
"""Parts of a unit in the store, whose counters are integers."""


@final
class Ranks:
    """This process among all of the job; alone it needs no process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._own: dict[str, int] = {}
        self._store: Any = None
        if size > 1:
            # The only handle on the store that every process has joined already.
            store = distributed_c10d._get_default_store()
            self._store = distributed_c10d.PrefixStore("longtail", store)

    def add(self, name: str, number: float | int) -> None:
        """Add to a sum, to a millionth."""
        parts = round(number * _MICRO)
        if self._store is None:
            self._own[name] = self._own.get(name, 0) + parts
        else:
            self._store.add(name, parts)

    def total(self, name: str) -> float:
        """Return a sum over all processes."""
        parts = self._own.get(name, 0) if self._store is None else self._store.add(name, 0)
        return parts / _MICRO

    def all_gather(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all processes; each must call it."""
        own = torch.tensor(row, dtype=torch.float64, device=self._device)
        if self.size == 1:
            return [own.tolist()]
        rows = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(rows, own)
        return [each.tolist() for each in rows]

    def broadcast(self, tensors: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Return the tensors of the process `source`; the others give tensors of their shapes."""
        if self.size == 1:
            return dict(tensors)
        received = {}
        for name in sorted(tensors):
            moved = tensors[name].detach().to(self._device).contiguous()
            moved = moved if self.rank == source else torch.empty_like(moved)
            dist.broadcast(moved, source)
            received[name] = moved.to(tensors[name].device)
        return received
