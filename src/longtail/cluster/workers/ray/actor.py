"""The process of a worker, as an actor of Ray; tensors pass through Ray as arrays."""

import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.ray import host_checks
from longtail.cluster.workers.ray.host_checks import Kit
from longtail.cluster.workers.worker import Worker


class Actor:
    """A worker in a process of its own; tasks run in one thread, messages in another."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        send_tensors_as_arrays()

    def make(
        self,
        make: Callable[[Place], Worker],
        place: Place,
        kit: Kit | None,
        files: Mapping[Path, Mapping[str, Any]],
    ) -> list[Path]:
        """Make the worker, or return the directories that its host lacks.

        This is a task, so that an exception in it is not a lost process.
        """
        if kit is not None:
            found = host_checks.find(kit)
            if lacks := [each for each in kit.folders if each not in {**found, **files}]:
                return lacks
            kept = {each: host_checks.keep(kit.folders[each], files[each]) for each in files}
            place = replace(place, found=found | kept)
        self._worker = make(place)
        return []

    def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a task or a message."""
        return method(self._worker, *args)

    def free_address(self) -> tuple[str, int]:
        """Return the address of the worker's machine, and a free port there."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]


def send_tensors_as_arrays() -> None:
    """Ray copies an array once on each side, and a pickled tensor several times."""
    ray.util.register_serializer(Tensor, serializer=_as_array, deserializer=_as_tensor)


def _as_array(tensor: Tensor) -> tuple[NDArray[np.uint8], torch.dtype, torch.Size]:
    """Return the bytes of a tensor, which may have a type that arrays lack."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _as_tensor(sent: tuple[NDArray[np.uint8], torch.dtype, torch.Size]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array.copy()).view(dtype).reshape(shape)
