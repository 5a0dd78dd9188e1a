"""The policy in shards: each member of a team holds some rows of every weight, gradient and moment.

    weights                        a layer's pass                         gradients
    member 0   rows 0, 1  --.          .--> all rows -->.              .--> rows 0, 1
    member 1   rows 2, 3  --+- gather -+--> all rows -->+- scatter_sum +--> rows 2, 3
    member 2   row  4     --'          '--> all rows -->'              '--> row  4

That is `torch.distributed.fsdp.fully_shard` (FSDP2; Rajbhandari et al. 2020, stage 3), of every
decoder layer, and of the rest together. All its traffic goes through the team, whose waits are
bounded; the mesh only says who is where. Every pass takes every member's rows, so all make equally
many, in the same order. The whole policy, in main memory, is what `gather` makes of the shards.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from longtail.model.transformer import Transformer
from longtail.rl.collectives import Team, tell
from longtail.rl.optim import Optimizer, OptimizerSettings

_MESH = GroupName("longtail-shards")


@final
class Shards:
    """A shard of everything. The team is for life: TeamError is the end of the shards, too."""

    def __init__(
        self,
        team: Team,
        whole: Transformer,
        settings: OptimizerSettings,
        moments: Mapping[str, Tensor],
        reference: Transformer | None,
    ) -> None:
        """Take this member's rows of a policy, its moments, and the KL reference, that in place.

        They are the same for all members. The rows come to lie on the team's device.
        """
        self._team, self._whole = team, whole
        borrowed = {id(p): nn.Parameter(p.detach()) for p in whole.parameters()}
        self.model = _shard(copy.deepcopy(whole, borrowed), team)  # which copies rows alone
        """What passes go through."""
        self._reference = None if reference is None else _shard(reference, team)
        self._parameters = {name: _dtensor(p) for name, p in self.model.named_parameters()}
        rows = {name: nn.Parameter(p.to_local()) for name, p in self._parameters.items()}
        self._rows = rows
        self.optimizer = Optimizer(rows.items(), settings, team=team)
        """Of the rows that are here."""
        self.optimizer.load({name: self._own(moment) for name, moment in moments.items()})

    def spare_passes(self, dealt: Sequence[Sequence[int]]) -> int:
        """Return how many micro-batches fewer than the busiest this member was dealt."""
        return max(map(len, dealt)) - len(dealt[self._team.rank])

    def sum_gradients(self, *, computed: bool, void: bool) -> list[int]:
        """Hand the optimizer what backward passes have summed up already; return whose is void."""
        passed = computed or any(p.grad is not None for p in self._parameters.values())
        for name, parameter in self._parameters.items():
            row, gradient = self._rows[name], parameter.grad
            assert gradient is not None or not passed, f"no gradient reached {name}"
            row.grad = torch.zeros_like(row) if gradient is None else _dtensor(gradient).to_local()
            parameter.grad = None
        # After a pass without a gradient the ends stay gathered, for a backward pass or the next.
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()
        if passed and isinstance(self._reference, FSDPModule):
            self._reference.reset_iter_state()
        return [rank for rank, is_void in enumerate(tell(self._team, void)) if is_void]

    def gather(self) -> None:
        """After an update, make the whole policy of all shards."""
        for name, parameter in self._whole.named_parameters():
            rows = self._rows[name].detach()
            most = -(-len(parameter) // self._team.size)
            padded = rows.new_zeros(most, *rows.shape[1:])
            padded[: len(rows)] = rows
            gathered = rows.new_empty(self._team.size * most, *rows.shape[1:])
            self._team.gather(gathered, padded)
            parameter.detach().copy_(gathered[: len(parameter)])

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this member's rows."""
        if tensor.dim() == 0:
            return tensor
        most = -(-len(tensor) // self._team.size)
        return tensor[self._team.rank * most :][:most]


@final
class _Gather(AllGather):
    """All-gather of FSDP2, by a team."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make room for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: object, async_op: bool = False
    ) -> None:
        """Gather; done on return, whatever is asked for."""
        self._team.gather(output_tensor, input_tensor)


@final
class _ScatterSum(ReduceScatter):
    """Reduce-scatter of FSDP2, by a team."""

    def __init__(self, team: Team) -> None:
        self._team = team

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make room for what is summed up."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: object,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Sum up; done on return, whatever is asked for."""
        assert op == dist.ReduceOp.SUM, f"gradients are summed, not reduced by {op}"
        self._team.scatter_sum(input_tensor, output_tensor)


def _shard(model: Transformer, team: Team) -> Transformer:
    """Leave this member's rows of a model alone; its gradients are sums over the team."""
    # A group without connections, for FSDP2 to ask for rank and size; known while it does.
    group = dist.ProcessGroup(team.rank, team.size)  # type: ignore[call-arg]
    group._set_group_name(_MESH)
    mesh = DeviceMesh(
        team.device.type, torch.arange(team.size), _init_backend=False, _rank=team.rank
    )
    mesh._dim_group_names = [_MESH]
    _register_process_group(_MESH, group)
    try:
        for module in (*model.layers, model):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_custom_all_gather(_Gather(team))
            sharded.set_custom_reduce_scatter(_ScatterSum(team))
    finally:
        _unregister_process_group(_MESH)
    model.fuse()  # it may have changed its device
    return model


def _dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "a pass is under way"
    return tensor
