"""Collective operations of the processes that compute one learner step together.

    rank 0   its micro-batches --> gradients --.                .--> same sum, same update
    rank 1   its micro-batches --> gradients --+-- all_reduce --+--> same sum, same update
    rank 2   no micro-batch left --> zeros ----'                '--> same sum, same update

A rank that is gone or late ends the process group for every rank: all waits are bounded, and the
pool of the workers forms a new group. Batches and losses are unknown here.
"""

import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longtail.errors import ConfigError, ProcessGroupError

_LOOPBACK = "127.0.0.1"


def balance(tokens: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    """Assign micro-batches of the given tokens to ranks: the longest next, to the least loaded.

    The busiest rank gets at most 4/3 - 1/(3 ranks) times its load in the best assignment (Graham
    1969, theorem 2). Deterministic; indices of a rank are ascending, and a rank may have none.

    Example: balance([5, 9, 3], ranks=2) -> [(1,), (0, 2)]
    """
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        assigned[rank].append(index)
        load[rank] += tokens[index]
    return [tuple(sorted(indices)) for indices in assigned]


class ProcessGroup:
    """Processes that call the same operations in the same order; this class is a group of one.

    Every operation raises ProcessGroupError if a rank is gone or late, or the group is closed; the
    tensors it was to fill then hold anything.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        """Number of this process in the group, from 0."""
        self.size = size
        """Number of processes."""

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, the same bits on every rank."""

    def broadcast(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of rank `source`, bit for bit."""

    def gather(self, row: Sequence[float | int]) -> Float[Tensor, "ranks numbers"]:
        """Return the rows of all ranks."""
        table = torch.zeros(self.size, len(row), dtype=torch.float64)
        table[self.rank] = torch.tensor(row, dtype=torch.float64)
        self.all_reduce([table])  # the other rows are zeros
        return table

    def guarded(self) -> AbstractContextManager[None]:
        """Raise ProcessGroupError for an error of torch.distributed over a mesh, too."""
        return nullcontext()


SINGLE_PROCESS = ProcessGroup()


@final
class TorchProcessGroup(ProcessGroup):
    """Processes connected by torch.distributed, outside of its global default group.

    The constructor waits for all ranks. An error closes the group, so that the other ranks fail at
    once instead of waiting. A process may form another group afterwards, at any address.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        *,
        backend: Literal["gloo", "nccl"],
        timeout_s: float,
    ) -> None:
        """Connect to the other ranks at `address`.

        The address is tcp://host:port, where rank 0 listens, or file://path, a file that no group
        has used before: then all ranks are on this machine, and listen on loopback only.

        Every wait ends after `timeout_s`; connecting takes several, at worst five to a rank that
        came and hangs. `gloo` reduces in main memory, `nccl` on the current GPU.
        """
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("backend 'nccl': this PyTorch is built without it; use 'gloo'")
        super().__init__(rank, size)
        self._device = torch.device("cpu" if backend == "gloo" else "cuda")
        self._name = f"rank {rank} of {size} at {address}"
        self._timeout = timedelta(seconds=timeout_s)
        self._group: dist.ProcessGroup | None = None
        self._connected: Any = None
        self._world: dist.ProcessGroup | None = None
        """This group among torch.distributed's globals; None if it is not."""
        self._world_before: dist.ProcessGroup | None = None
        """The default group of another part of the process, such as vLLM's."""
        with self._failing("connecting to the other ranks"):
            self._group = self._connect(address, backend)

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks, the same bits on every rank."""
        for tensor in tensors:
            own = tensor.detach()
            flat = own.contiguous().to(self._device)
            with self._failing(f"the sum of {flat.numel():,} numbers"):
                # NOTE: a local variable for the work would keep it alive in the traceback, and with
                # it the connections: other ranks would wait for a rank that has left.
                self._open_group().allreduce([flat]).wait(self._timeout)
            if flat is not own:
                own.copy_(flat)

    def broadcast(self, source: int, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of rank `source`, bit for bit."""
        for tensor in tensors:
            flat = tensor.detach().contiguous().to(self._device)
            with self._failing(f"the broadcast of {flat.numel():,} numbers from rank {source}"):
                self._open_group().broadcast(flat, source).wait(self._timeout)
            if self.rank != source:
                tensor.detach().copy_(flat)

    def mesh(self) -> DeviceMesh:
        """Make these ranks, by the same connections, torch.distributed's global default group.

        FSDP2 takes no other. It ends when this group is closed. Who made the default group before
        keeps that as an object: vLLM of one process asks for the default only at its start.
        """
        device = self._device.type
        self._world_before, dist.group.WORLD = dist.group.WORLD, None
        dist.Backend.register_backend("longtail", lambda *_: self._connected, devices=[device])
        dist.init_process_group(
            "longtail",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # all are connected
            rank=self.rank,
            world_size=self.size,
            timeout=self._timeout,
        )
        self._world = dist.group.WORLD
        assert self._world is not None
        return DeviceMesh.from_group(self._world, device)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Close the group and raise ProcessGroupError if a collective over `mesh` fails.

        Computations raise RuntimeError, too; the traceback shows where it comes from.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            if not any(f.f_globals.get("__name__", "").startswith(dist.__name__) for f in frames):
                raise
            with self._failing("a collective of the shards"):
                raise

    def close(self) -> None:
        """Disconnect; ranks that wait for this one raise ProcessGroupError.

        What was sharded over `mesh` keeps the connections, so they raise it after their timeout.
        """
        self._group = self._connected = None
        if self._world is not None:
            ended, self._world = self._world, None
            if self._world_before is not None:
                dist.group.WORLD = self._world_before
            dist.destroy_process_group(ended)  # with all others, if it is the default one

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise ProcessGroupError(f"{self._name}: the process group is closed; form another one")
        return self._group

    @contextmanager
    def _failing(self, operation: str) -> Iterator[None]:
        """Close the group and raise ProcessGroupError if torch raises any RuntimeError."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            traceback.clear_frames(error.__traceback__)  # which would keep connections open
            reason = str(error).partition("\n")[0]
            raise ProcessGroupError(f"{self._name}: {operation} failed: {reason}") from error

    def _connect(self, address: str, backend: str) -> dist.ProcessGroup:
        """Build a group that is not registered in torch.distributed's globals."""
        store, own = self._store(address)
        group = dist.ProcessGroup(store, self.rank, self.size)
        if backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = self._timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
            self._connected = dist.ProcessGroupGloo(store, self.rank, self.size, gloo)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            # Otherwise a watchdog ends the whole process instead of raising an error.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            if own == _LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            self._connected = dist.ProcessGroupNCCL(store, self.rank, self.size, nccl)
            kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(self._device, kind, self._connected)
        return group

    def _store(self, address: str) -> tuple[Any, str]:
        """Return the store in which ranks find each other, and this rank's own host address."""
        where = urlsplit(address)
        if where.scheme == "file":
            file = dist.FileStore(where.path, self.size)  # type: ignore[attr-defined]
            file.set_timeout(self._timeout)
            return file, _LOOPBACK
        assert where.hostname, f"{self._name}: there is no host"
        assert where.port, f"{self._name}: there is no port"
        host, port, is_first = where.hostname, where.port, self.rank == 0
        listens: dict[str, Any] = {"master_listen_fd": _listen(host, port)} if is_first else {}
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, self.size, is_first, self._timeout, **listens
        )
        return store, _own_address(host, port)


def _listen(host: str, port: int) -> int:
    """Return a listening socket of this address only; torch would listen on all networks."""
    try:
        return socket.create_server((host, port)).detach()
    except OSError as error:
        raise RuntimeError(f"{host}:{port}: {error}") from error  # as torch would


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine as `host` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
