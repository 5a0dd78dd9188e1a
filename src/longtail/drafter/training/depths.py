"""Agreement of a drafter with its target, depth by depth."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.drafter.eagle.loss import expected_accept_len


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthReport:
    """Agreement of drafter and target on given text, at depth 1, 2, ...

    Example: DepthReport(agreement=(0.81, 0.74), overlap=(0.80, 0.71), cross_entropy=(0.9, 1.1))
    """

    agreement: tuple[float, ...]
    """Share of tokens with the same most likely token."""
    overlap: tuple[float, ...]
    """Mean of sum_v min(p, q)."""
    cross_entropy: tuple[float, ...]

    @property
    def accept_len(self) -> float:
        """Expected accept length of a chain of these depths under an ideal coupling."""
        return expected_accept_len(self.overlap)

    @staticmethod
    def of(scores: Float[Tensor, "3 depths"], counts: Sequence[int]) -> "DepthReport":
        """Return the means of sums over `counts` rows: agreement, overlap and cross-entropy."""
        agreement, overlap, cross_entropy = (scores / torch.tensor(counts)).tolist()
        return DepthReport(
            agreement=tuple(agreement), overlap=tuple(overlap), cross_entropy=tuple(cross_entropy)
        )
