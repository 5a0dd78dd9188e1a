"""The optimizer of a drafter, and names of tensors in its training state."""

from collections.abc import Mapping

from torch import Tensor, nn

from longtail.drafter.eagle.layer import EagleLayer
from longtail.rl.muon import MuonOptimizer
from longtail.rl.optim import Optimizer, OptimizerSettings


def make_optimizer(
    layer: EagleLayer, settings: OptimizerSettings, matrix_rate: float | None
) -> Optimizer | MuonOptimizer:
    """Return Muon for the matrices at `matrix_rate`; AdamW for all parameters if it is None."""
    if matrix_rate is None:
        return Optimizer(layer.named_parameters(), settings)
    module = nn.ModuleDict({"layers": nn.ModuleList([layer])})  # Muon applies inside `layers`
    return MuonOptimizer(module, settings, matrix_rate=matrix_rate)


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix before each name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors of a prefix, and remove it."""
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}


def never() -> bool:
    """Return False: the check for a stop of work that is not stopped."""
    return False
