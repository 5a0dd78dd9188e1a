"""Who computes a learner step together: how the work is dealt out, how the results are added up.

    member 0   its micro-batches --> gradients --.              .--> the same sum, the same update
    member 1   its micro-batches --> gradients --+-- Team.sum --+--> the same sum, the same update
    member 2   none left for it --> zeros -------'              '--> the same sum, the same update

It knows gradients and processes, but no batch and no loss. A member that is gone or late loses the
team for everyone: all waits are bounded, and whoever supervises the members forms a new team.
"""

import abc
import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, final
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longtail.errors import ConfigError, TeamError

_LOOPBACK = "127.0.0.1"
_BUNDLE = 2**20
"""Numbers that travel together; a larger tensor travels alone, without being copied for it."""


def spread(tokens: Sequence[int], members: int) -> list[tuple[int, ...]]:
    """Deal micro-batches of so many tokens out: the longest next, to whoever has least to do.

    The busiest member gets at most 4/3 - 1/(3 members) times what it would if the tokens were dealt
    out as evenly as can be (Graham 1969, theorem 2). Deterministic; every share is in ascending
    order, and some are empty where there are fewer micro-batches than members.

    Example: spread([5, 9, 3], members=2) -> [(1,), (0, 2)]
    """
    shares: list[list[int]] = [[] for _ in range(members)]
    load = [0] * members
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        member = min(range(members), key=lambda m: (load[m], m))
        shares[member].append(index)
        load[member] += tokens[index]
    return [tuple(sorted(share)) for share in shares]


class Team(abc.ABC):
    """Members that call `sum` in the same order, with tensors of the same shapes."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Which member this is, from 0."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many members there are."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Where what travels lies: `gather` and `scatter_sum` take no tensors of elsewhere."""

    @abc.abstractmethod
    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all members, the same bits on every member.

        Raises TeamError if that cannot be done; the tensors then hold anything.
        """

    @abc.abstractmethod
    def take(self, owner: int, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of member `owner`, bit for bit.

        Raises TeamError if that cannot be done; the tensors then hold anything, but the owner's.
        """

    @abc.abstractmethod
    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill `whole` with what every member gives, by rank; `own` may be its place in there.

        Raises TeamError if that cannot be done; `whole` then holds anything.
        """

    @abc.abstractmethod
    def scatter_sum(self, whole: Tensor, own: Tensor) -> None:
        """Fill `own` with this member's part, by rank, of the sum of everyone's `whole`.

        Raises TeamError if that cannot be done; `own` then holds anything.
        """


@final
class Alone(Team):
    """A team of one, which has nothing to add."""

    @property
    def rank(self) -> int:
        """Return 0."""
        return 0

    @property
    def size(self) -> int:
        """Return 1."""
        return 1

    @property
    def device(self) -> torch.device:
        """Return main memory."""
        return torch.device("cpu")

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are."""

    def take(self, owner: int, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are: they are the owner's."""

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Copy what is all there is."""
        whole.copy_(own)

    def scatter_sum(self, whole: Tensor, own: Tensor) -> None:
        """Copy what is all there is."""
        own.copy_(whole)


ALONE = Alone()


def tell(team: Team, number: float) -> list[float]:
    """Tell the others a number; return everyone's, by rank."""
    row = torch.zeros(team.size, dtype=torch.float64)
    row[team.rank] = number
    team.sum([row])  # all other rows are zeros here
    return row.tolist()


def sum_gradients(team: Team, model: nn.Module, *, computed: bool, void: bool) -> list[int]:
    """Add the gradients of all members up, in place; return the ranks of those that are void.

    A member that computed none adds zeros, and so does one that had to stop (`void`): it must not
    keep the others waiting. A sum with a void member in it is of no use.
    """
    gradients = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None and (void or not computed):
            parameter.grad = torch.zeros_like(parameter)
        assert parameter.grad is not None, f"no gradient reached {name}: was the model packed?"
        gradients.append(parameter.grad)
    flags = gradients[0].new_zeros(team.size)
    flags[team.rank] = void
    team.sum([*gradients, flags])
    return flags.nonzero()[:, 0].tolist()


@final
class TorchTeam(Team):
    """Processes joined by torch.distributed, in a group of their own.

    Lifecycle: constructing waits for all members; `sum` in turn; `close`. An error closes the team,
    so that the others notice at once instead of waiting for this member. A process may form
    another team afterwards, at another address or the same one.
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
        """Meet the other members at `address`.

        That is tcp://host:port, where member 0 listens, or file://path, a file that no team has
        used before: then all members are on this machine, and listen on loopback only.

        Every wait ends after `timeout_s`; to meet takes several, at worst five to connect to a
        member that came and hangs. `gloo` adds up in main memory, `nccl` on the current GPU.
        """
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigError("backend 'nccl': this PyTorch is built without it; use 'gloo'")
        self._rank, self._size = rank, size
        self._name = f"member {rank} of {size} at {address}"
        self._timeout = timedelta(seconds=timeout_s)
        self._device = torch.device("cpu" if backend == "gloo" else "cuda")
        self._group: dist.ProcessGroup | None = None
        with self._waiting_for("the other members to come"):
            self._group = self._meet(address, backend)

    @property
    def rank(self) -> int:
        """Which member this is, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many members there are."""
        return self._size

    @property
    def device(self) -> torch.device:
        """Main memory, or the current GPU."""
        return self._device

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all members, the same bits on every member.

        Small tensors of one dtype travel together. Raises TeamError if a member is gone or late, or
        if the team is closed; the tensors then hold anything.
        """
        for bundle in _bundles([tensor.detach() for tensor in tensors]):
            is_copied = len(bundle) > 1 or not bundle[0].is_contiguous()
            flat = torch.cat([each.flatten() for each in bundle]) if is_copied else bundle[0]
            flat = flat.to(self._device)
            with self._waiting_for(f"the sum of {flat.numel():,} numbers"):
                # NOTE: named, the work would live on in the error's traceback, and with it the
                # connections: others would wait for a member that has left.
                self._open_group().allreduce([flat]).wait(self._timeout)
            if flat is not bundle[0]:
                parts = torch.split(flat.view(-1), [each.numel() for each in bundle])
                for each, part in zip(bundle, parts, strict=True):
                    each.copy_(part.view(each.shape))

    def take(self, owner: int, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by that of member `owner`, bit for bit; errors are those of `sum`."""
        for tensor in tensors:
            flat = tensor.detach().contiguous().to(self._device)
            with self._waiting_for(f"{flat.numel():,} numbers of member {owner}"):
                self._open_group().broadcast(flat, owner).wait(self._timeout)
            if self._rank != owner:
                tensor.detach().copy_(flat)

    def gather(self, whole: Tensor, own: Tensor) -> None:
        """Fill `whole` with what every member gives, by rank; errors are those of `sum`."""
        with self._waiting_for(f"{whole.numel():,} gathered numbers"):
            self._open_group()._allgather_base(whole, own).wait(self._timeout)

    def scatter_sum(self, whole: Tensor, own: Tensor) -> None:
        """Fill `own` with this member's part of the sum; errors are those of `sum`."""
        with self._waiting_for(f"its part of the sum of {whole.numel():,} numbers"):
            options = dist.ReduceScatterOptions()
            self._open_group()._reduce_scatter_base(own, whole, options).wait(self._timeout)

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise TeamError(f"{self._name}: the team is closed; form another one")
        return self._group

    def close(self) -> None:
        """Leave the team; members that still wait for this one raise TeamError."""
        self._group = None

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        """Turn what torch raises, RuntimeErrors of many kinds, into the end of the team."""
        try:
            yield
        except RuntimeError as error:
            self.close()
            traceback.clear_frames(error.__traceback__)  # which would keep connections open
            reason = str(error).partition("\n")[0]
            raise TeamError(f"{self._name} waited in vain for {what}: {reason}") from error

    def _meet(self, address: str, backend: str) -> dist.ProcessGroup:
        """Build a group that torch.distributed's globals know nothing of."""
        store, own = self._store(address)
        group = dist.ProcessGroup(store, self._rank, self._size)
        if backend == "gloo":
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = self._timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
            joined: Any = dist.ProcessGroupGloo(store, self._rank, self._size, gloo)
            kind = dist.ProcessGroup.BackendType.GLOO
        else:
            # Without it a watchdog ends the whole process where we want an error.
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
            if own == _LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            joined = dist.ProcessGroupNCCL(store, self._rank, self._size, nccl)
            kind = dist.ProcessGroup.BackendType.NCCL
        group._set_default_backend(kind)
        group._register_backend(self._device, kind, joined)
        return group

    def _store(self, address: str) -> tuple[Any, str]:
        """Return where members leave word for each other, and this one's address for them.

        That is on loopback if all of them are there.
        """
        where = urlsplit(address)
        if where.scheme == "file":
            file = dist.FileStore(where.path, self._size)  # type: ignore[attr-defined]
            file.set_timeout(self._timeout)
            return file, _LOOPBACK
        assert where.hostname, f"{self._name}: there is no host"
        assert where.port, f"{self._name}: there is no port"
        store = dist.TCPStore(  # type: ignore[attr-defined]
            where.hostname, where.port, self._size, self._rank == 0, self._timeout
        )
        return store, _own_address(where.hostname, where.port)


def _own_address(host: str, port: int) -> str:
    """Find the address by which `host` would see this machine; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def _bundles(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype, one after the other, in bundles of at most _BUNDLE numbers or one."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bundle: list[Tensor] = []
        room = _BUNDLE
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bundle and tensor.numel() > room:
                yield bundle
                bundle, room = [], _BUNDLE
            bundle.append(tensor)
            room -= tensor.numel()
        yield bundle
