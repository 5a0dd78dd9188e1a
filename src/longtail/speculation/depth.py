"""How deep a draft goes: whether one level more is worth a pass of the drafter.

What a level promises beyond its price, its gain, is known as soon as its parents are: on the
device. On a CPU a look at it is free. Elsewhere a look stalls the queue of launches; there it is
foreseen from what the levels of earlier drafts turned out to be worth, which is read with the
drafts, at their end.

    gain of a pass below depth      1     2     3     4
    three rounds ago                  0.9   0.5   0.1  -0.2
    two rounds ago                    0.8   0.2  -0.3
    the last one                      1.0   0.4  -0.1
    sum                               2.7   1.1  -0.3             this round goes to depth 3

A round learns of its deepest level, too, whether one below it would have been worth it: so depth
rises by a level a round while that pays, and no level is drafted only to find out.
"""

import abc
from collections import deque
from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

REMEMBERED = 8
"""Rounds. Behind a change of what levels are worth, that many later at the latest, each round goes
a level deeper until the depth is that of a look."""


class DepthPolicy(abc.ABC):
    """Decides, level by level, how deep the drafts of a round go."""

    @abc.abstractmethod
    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Tell whether to draft below the last level; of each so far, what that promises."""

    @abc.abstractmethod
    def learn(self, gains: Sequence[float]) -> None:
        """Take note of a round's gains, those of its last level among them."""


@final
class ExactDepth(DepthPolicy):
    """Looks at every level, and needs to remember nothing."""

    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Read the last one."""
        return bool(gains[-1] >= 0)

    def learn(self, gains: Sequence[float]) -> None:
        """What was seen is seen again."""


@final
class PredictedDepth(DepthPolicy):
    """Looks at nothing: goes by the sum over the last rounds that got as deep. The first goes on
    as long as it may.
    """

    def __init__(self) -> None:
        self._rounds: deque[Sequence[float]] = deque(maxlen=REMEMBERED)

    def should_extend(self, gains: Sequence[Float[Tensor, ""]]) -> bool:
        """Go one level beyond what lately paid."""
        if not self._rounds:
            return True
        level = len(gains) - 1
        known = [each[level] for each in self._rounds if len(each) > level]
        return bool(known) and sum(known) >= 0

    def learn(self, gains: Sequence[float]) -> None:
        """Remember them."""
        self._rounds.append(gains)


def select_depth_policy(device: torch.device) -> DepthPolicy:
    """Look where a look is free."""
    return ExactDepth() if device.type == "cpu" else PredictedDepth()
