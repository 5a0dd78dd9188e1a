"""The depth of drafts: whether another level pays for a pass of the drafter.

The gain of a level is its expected benefit minus its cost, known on the device as soon as its
parents are. Reading it is free on a CPU but stalls the launch queue of a GPU. There it is predicted
from the gains of earlier rounds, which are read together with the finished drafts.

    gain of a pass below depth      1     2     3     4
    three rounds ago                  0.9   0.5   0.1  -0.2
    two rounds ago                    0.8   0.2  -0.3
    the last one                      1.0   0.4  -0.1
    sum                               2.7   1.1  -0.3             this round goes to depth 3

Each round also computes the gain of the level below its deepest one. So the depth rises by a level
per round while that pays, and no level is drafted only to measure it.
"""

import abc
from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

REMEMBERED = 8
"""Number of rounds in a prediction, and of rounds until it follows a change of the gains."""


class DepthPolicy(abc.ABC):
    """Decides after each level whether a round of drafts goes deeper."""

    @abc.abstractmethod
    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Return whether to draft below the last level, given the gains of each level so far."""

    @abc.abstractmethod
    def learn(self, gains: Sequence[float]) -> None:
        """Record the gains of a round, including that of its last level."""


@final
class ExactDepth(DepthPolicy):
    """Reads the gain of each level."""

    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Return whether the last gain is not negative."""
        return bool(gains[-1] >= 0)

    def learn(self, gains: Sequence[float]) -> None:
        """Do nothing: gains are read, not predicted."""


@final
class PredictedDepth(DepthPolicy):
    """Predicts gains by their sum over the last rounds that got as deep; the first has no limit."""

    def __init__(self) -> None:
        self._rounds: deque[Sequence[float]] = deque(maxlen=REMEMBERED)

    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Return whether the level paid in the last rounds."""
        if not self._rounds:
            return True
        level = len(gains) - 1
        known = [each[level] for each in self._rounds if len(each) > level]
        return bool(known) and sum(known) >= 0

    def learn(self, gains: Sequence[float]) -> None:
        """Keep the gains of the round."""
        self._rounds.append(gains)


def select_depth_policy(device: torch.device) -> DepthPolicy:
    """Return the exact policy where reading a gain is free."""
    return ExactDepth() if device.type == "cpu" else PredictedDepth()
