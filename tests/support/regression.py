"""A ridge regression from its sums, as a reference."""

import torch
from torch import Tensor

from longtail.drafter.ridge.sums import RIDGE


def ridge(gram: Tensor, moment: Tensor, num_rows: int) -> Tensor:
    """Return the weights of least squared error plus RIDGE times each weight's square.

    Inputs are first scaled to a mean square of 1, so that their units do not matter.
    """
    mean_square = gram.diagonal() / num_rows
    scale = mean_square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    scaled = gram * scale[:, None] * scale
    scaled.diagonal().add_(RIDGE)
    solved = torch.linalg.solve(scaled, moment * scale[:, None])
    return solved * scale[:, None]
