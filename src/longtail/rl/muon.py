"""Muon for the matrices inside decoder layers, AdamW for everything else.

Momentum is orthogonalised before it is applied (Jordan et al. 2024), so all directions of a matrix
are updated equally. From fresh weights Muon needs a fraction of AdamW's tokens; for a trained model
AdamW alone, `rl.optim.Optimizer` with the same interface, is the usual choice. `torch.optim.Muon`
is the same in bfloat16; where a processor emulates that, it takes 30 times as long.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.config.sections import OptimizerSection
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl.optim import Optimizer, Update, scheduled_rate
from longtail.system.device import multiplies_bfloat16

_MOMENTUM = "momentum/"
_DECAY = 0.95
"""Decay of the momentum; the next gradient is looked ahead to (Nesterov)."""
_QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration (Jordan et al. 2024): steep at 0, near 1 after a few steps."""
_ITERATIONS = 5


def orthogonal(
    matrix: Float[Tensor, "rows columns"], dtype: torch.dtype
) -> Float[Tensor, "rows columns"]:
    """Return a matrix of the same singular vectors, with singular values of about 0.7 to 1.2.

    A Newton-Schulz iteration of odd polynomials, computed in `dtype`.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(dtype, copy=True)
    x /= x.norm().clamp(min=1e-7)
    linear, cubic, quintic = _QUINTIC
    for _ in range(_ITERATIONS):
        square = x @ x.T
        inner = torch.addmm(square, square, square, beta=cubic, alpha=quintic)
        x = torch.addmm(x, inner, x, beta=linear)
    return x.T if is_tall else x


@final
class MuonOptimizer:
    """Updates matrices and `others` from their accumulated gradients; all of them or none.

    `settings` are those of AdamW's part; the matrices have the learning rate `matrix_rate` and the
    same schedule and decay. Muon ignores the scale of gradients, so only AdamW's are clipped.
    """

    def __init__(
        self,
        matrices: Mapping[str, nn.Parameter],
        others: Iterable[tuple[str, nn.Parameter]],
        settings: OptimizerSection,
        *,
        matrix_rate: float,
        total_steps: int = 0,
    ) -> None:
        self._matrices, self._total_steps = matrices, total_steps
        self._adamw = Optimizer(others, settings, total_steps=total_steps)
        self._schedule = settings.model_copy(update={"learning_rate": matrix_rate})
        self._momentum: dict[str, Tensor] = {}

    def update(self, step: int) -> Update:
        """Apply the gradients at the rates of `step`, then free them.

        Raises NonFiniteError naming the step and the parameter; nothing is modified then.
        """
        try:
            norms = [self._norm(step, name) for name in self._matrices]
            others = self._adamw.update(step)
            rate = scheduled_rate(step, self._schedule, self._total_steps)
            for name, matrix in self._matrices.items():
                self._move(name, matrix, rate)
        finally:
            self.discard()
        norm = torch.stack([*norms, torch.tensor(others.grad_norm)]).norm()
        return replace(others, grad_norm=float(norm))

    @torch.no_grad()
    def _move(self, name: str, matrix: nn.Parameter, rate: float) -> None:
        """Move a matrix by its orthogonalised momentum."""
        assert matrix.grad is not None, "checked by `_norm`"
        momentum = self._momentum.setdefault(name, torch.zeros_like(matrix.grad))
        momentum.lerp_(matrix.grad, 1 - _DECAY)
        dtype = torch.bfloat16 if multiplies_bfloat16(matrix.device) else torch.float32
        direction = orthogonal(matrix.grad.lerp(momentum, _DECAY), dtype)
        matrix.mul_(1 - rate * self._schedule.weight_decay)
        rows, columns = matrix.shape
        matrix.add_(direction, alpha=-rate * max(1.0, rows / columns) ** 0.5)

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
        for matrix in self._matrices.values():
            matrix.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """Copy the moments of both parts; empty before the first update."""
        momentum = {f"{_MOMENTUM}{name}": t.clone() for name, t in self._momentum.items()}
        return momentum | self._adamw.tensors()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy moments as `tensors` gave them; CheckpointError if they are another model's."""
        self._adamw.load({n: t for n, t in tensors.items() if not n.startswith(_MOMENTUM)})
        self._momentum.clear()
        for name, parameter in self._matrices.items() if tensors else ():
            momentum = tensors.get(f"{_MOMENTUM}{name}")
            if momentum is None or momentum.shape != parameter.shape:
                raise CheckpointError(f"optimizer state of another model: {name} has no momentum")
            self._momentum[name] = momentum.to(parameter.device, copy=True)
