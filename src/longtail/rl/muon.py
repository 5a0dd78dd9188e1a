"""Muon for the matrices inside decoder layers, AdamW for everything else.

Momentum is orthogonalised before it is applied (Jordan et al. 2024), so all directions of a matrix
are updated equally. From fresh weights Muon needs a fraction of AdamW's tokens; for a trained model
AdamW alone, `rl.optim.Optimizer` with the same interface, is the usual choice.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl.optim import Optimizer, OptimizerSettings, Update, scheduled_rate

_MOMENTUM = "momentum"


@final
class MuonOptimizer:
    """Updates a model's parameters from their accumulated gradients; all of them or none.

    `settings` are those of AdamW's part; the matrices have the learning rate `matrix_rate` and the
    same schedule and decay. Muon ignores the scale of gradients, so only AdamW's are clipped.
    """

    def __init__(
        self, model: nn.Module, settings: OptimizerSettings, *, matrix_rate: float = 0.02
    ) -> None:
        self._matrices = {
            name: p for name, p in model.named_parameters() if p.dim() == 2 and "layers." in name
        }
        others = (
            (name.replace(".", "/"), parameter)  # the names in checkpoints
            for name, parameter in model.named_parameters()
            if name not in self._matrices
        )
        self._adamw = Optimizer(others, settings)
        self._schedule = replace(settings, learning_rate=matrix_rate)
        self._muon = torch.optim.Muon(
            self._matrices.values(), lr=matrix_rate, weight_decay=settings.weight_decay
        )

    def update(self, step: int) -> Update:
        """Apply the gradients at the rates of `step`, then free them.

        Raises NonFiniteError naming the step and the parameter; nothing is modified then.
        """
        try:
            norms = [self._norm(step, name) for name in self._matrices]
            others = self._adamw.update(step)
            for group in self._muon.param_groups:
                group["lr"] = scheduled_rate(step, self._schedule)
            self._muon.step()  # type: ignore[no-untyped-call]
        finally:
            self.discard()
        norm = torch.stack([*norms, torch.tensor(others.grad_norm)]).norm()
        return replace(others, grad_norm=float(norm))

    def _norm(self, step: int, name: str) -> Float[Tensor, ""]:
        gradient = self._matrices[name].grad
        if gradient is None or not gradient.isfinite().all():
            raise NonFiniteError(
                f"step {step}: the gradient of {name} is not finite; no update was made"
            )
        return gradient.norm()

    def discard(self) -> None:
        """Free accumulated gradients without using them."""
        self._adamw.discard()
        self._muon.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Copy the moments of both parts; empty before the first update."""
        momentum = {
            f"{_MOMENTUM}/{name}": self._muon.state[parameter]["momentum_buffer"].clone()
            for name, parameter in self._matrices.items()
            if parameter in self._muon.state
        }
        return momentum | self._adamw.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy moments as `tensors` gave them; CheckpointError if they are another model's."""
        own = {name: t for name, t in tensors.items() if name.startswith(f"{_MOMENTUM}/")}
        self._adamw.load({name: t for name, t in tensors.items() if name not in own})
        self._muon.state.clear()
        for name, parameter in self._matrices.items() if tensors else ():
            momentum = own.get(f"{_MOMENTUM}/{name}")
            if momentum is None or momentum.shape != parameter.shape:
                raise CheckpointError(f"optimizer state of another model: {name} has no momentum")
            self._muon.state[parameter] = {
                "momentum_buffer": momentum.to(parameter.device, copy=True)
            }
