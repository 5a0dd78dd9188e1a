"""The optimizer of a drafter."""

from torch import nn

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.layer import EagleLayer
from longtail.rl.muon import MuonOptimizer
from longtail.rl.optim import Optimizer


def make_optimizer(
    layer: EagleLayer,
    settings: OptimizerSection,
    matrix_rate: float | None,
    total_steps: int = 0,
) -> Optimizer | MuonOptimizer:
    """Return Muon for the matrices at `matrix_rate`; AdamW for all parameters if it is None."""
    if matrix_rate is None:
        return Optimizer(layer.named_parameters(), settings, total_steps=total_steps)
    module = nn.ModuleDict({"layers": nn.ModuleList([layer])})  # Muon applies inside `layers`
    return MuonOptimizer(module, settings, matrix_rate=matrix_rate, total_steps=total_steps)
