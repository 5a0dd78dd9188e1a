"""Muon: matrices move by their orthogonalised momentum (Jordan et al. 2024).

So all directions of a matrix are updated equally. From fresh weights Muon needs a fraction of
AdamW's tokens; for a trained model AdamW alone is the usual choice. `torch.optim.Muon` is the same
in bfloat16; where a processor emulates that, it takes 30 times as long.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.system.device import multiplies_bfloat16

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


@torch.no_grad()
def move(matrix: nn.Parameter, momentum: Tensor, rate: float, weight_decay: float) -> None:
    """Move a matrix by its gradient, which is added to the momentum."""
    assert matrix.grad is not None, "the optimizer has checked it"
    momentum.lerp_(matrix.grad, 1 - _DECAY)
    dtype = torch.bfloat16 if multiplies_bfloat16(matrix.device) else torch.float32
    direction = orthogonal(matrix.grad.lerp(momentum, _DECAY), dtype)
    matrix.mul_(1 - rate * weight_decay)
    rows, columns = matrix.shape
    matrix.add_(direction, alpha=-rate * max(1.0, rows / columns) ** 0.5)
