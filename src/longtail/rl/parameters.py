"""Checks and copies of a model's named parameters, for both learners."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.errors import CheckpointError, NonFiniteError


def load_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into the parameters; CheckpointError, before any copy, if one does not fit."""
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name not in tensors or tensors[name].shape != parameter.shape:
            raise CheckpointError(f"weights of another model: {name} is missing or misshapen")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


def loss_error(
    model: nn.Module, loss: Float[Tensor, ""], step: int, name: str
) -> NonFiniteError | None:
    """Return the error of a loss that is not finite, naming the broken weights if there are any."""
    if loss.isfinite():
        return None
    broken = (n for n, p in model.named_parameters() if not p.isfinite().all())
    culprit = next(broken, name)
    return NonFiniteError(f"step {step}: {culprit} is not finite; no update was made")
