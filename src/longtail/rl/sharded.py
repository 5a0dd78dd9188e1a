"""The policy in shards: each rank of a group holds some rows of every weight, gradient and moment.

    weights                      a layer's pass                            gradients
    rank 0   rows 0, 1  --.              .--> all rows -->.                  .--> rows 0, 1
    rank 1   rows 2, 3  --+- all_gather -+--> all rows -->+- reduce_scatter -+--> rows 2, 3
    rank 2   row  4     --'              '--> all rows -->'                  '--> row  4

`torch.distributed.fsdp.fully_shard` (FSDP2; Rajbhandari et al. 2020, stage 3) shards every decoder
layer, and the rest together. It uses the connections of our process group, whose waits are bounded.
Every pass needs the rows of all ranks, so all ranks make equally many passes, in the same order.
`Shards.gather` assembles the whole policy in main memory.
"""

import copy
from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from longtail.config.sections import OptimizerSection
from longtail.model.hf.model import PolicyTransformer
from longtail.rl.collectives import ProcessGroup, TorchProcessGroup
from longtail.rl.optim import Optimizer


@final
class Shards:
    """A rank's shard of policy, moments and reference. A ProcessGroupError ends the shards, too."""

    def __init__(
        self,
        group: ProcessGroup,
        whole: PolicyTransformer,
        settings: OptimizerSection,
        moments: Mapping[str, Tensor],
        reference: PolicyTransformer | None,
        *,
        total_steps: int,
    ) -> None:
        """Copy this rank's rows of policy and moments to the group's device; shard the reference.

        All ranks pass equal values. The reference is sharded in place.
        """
        assert isinstance(group, TorchProcessGroup), "several ranks are connected"
        self._group, self._whole, mesh = group, whole, group.mesh()
        borrowed = {id(p): nn.Parameter(p.detach()) for p in whole.parameters()}
        self.model = _shard(copy.deepcopy(whole, borrowed), mesh)  # copies only this rank's rows
        """Sharded model, for forward and backward passes."""
        self._reference = None if reference is None else _shard(reference, mesh)
        self._parameters = {name: _dtensor(p) for name, p in self.model.named_parameters()}
        rows = {name: nn.Parameter(p.to_local()) for name, p in self._parameters.items()}
        self._rows = rows
        self.optimizer = Optimizer(rows.items(), settings, total_steps=total_steps, group=group)
        """Optimizer of this rank's rows."""
        self.optimizer.load({name: self._own(moment) for name, moment in moments.items()})

    def reduce_gradients(self, factor: float) -> None:
        """Give the sums of gradients times a factor to the optimizer; zeros if there are none."""
        passed = any(p.grad is not None for p in self._parameters.values())
        for name, parameter in self._parameters.items():
            row, gradient = self._rows[name], parameter.grad
            assert gradient is not None or not passed, f"no gradient reached {name}"
            found = torch.zeros_like(row) if gradient is None else _dtensor(gradient).to_local()
            row.grad = found.mul_(factor)
            parameter.grad = None
        # After a pass without gradient, embedding and head stay gathered for a later pass.
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()
        if passed and isinstance(self._reference, FSDPModule):
            self._reference.reset_iter_state()

    def gather(self) -> None:
        """Assemble the whole policy from the shards of all ranks."""
        with torch.no_grad():
            for name, parameter in self._whole.named_parameters():
                parameter.copy_(self._parameters[name].full_tensor())

    def _own(self, tensor: Tensor) -> Tensor:
        """Return this rank's rows; of a scalar, all."""
        if tensor.dim() == 0:
            return tensor
        most = -(-len(tensor) // self._group.size)
        return tensor[self._group.rank * most :][:most]


def _shard(model: PolicyTransformer, mesh: DeviceMesh) -> PolicyTransformer:
    """Keep only this rank's rows of a model; its gradients become sums over the ranks."""
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    for module in (*layers, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.fuse()  # it may have changed its device
    return model


def _dtensor(tensor: Tensor) -> DTensor:
    assert isinstance(tensor, DTensor), "a pass is under way"
    return tensor
