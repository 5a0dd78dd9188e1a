"""The shape of a draft, and the thresholds for its nodes.

    depth 3, width 2, beam 1                depth 3, width 2 (beam 2)

          0                                        0
         / \\                                      / \
        1   2                                    1   2
       / \\                                     / |   | \
      3   4                                   3  4   5  6      two of these are expanded
     / \\                                     ...

A beam of 1 costs one row of the drafter per level for any width: the second-best token is known
anyway, and costs only its verification.
"""

import abc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.errors import ConfigError
from longtail.speculation.tree import MAX_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftThresholds:
    """Minimum probabilities of nodes; 0: no threshold.

    Example: DraftThresholds(verify=0.3, expand=0.4, level=1.5)
    """

    verify: float = 0.0
    """Minimum probability of a node of the draft."""
    expand: float = 0.0
    """Minimum probability of a node whose children are drafted."""
    level: float = 0.0
    """Minimum of the sum of (probability - `expand`) over the parents of another level, in all
    requests: the fixed cost of a drafter pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The shape of a draft, the same for every request.

    Example: Strategy(depth=6, width=1, size=6) is a chain of six
    """

    depth: int
    """Length of the longest path; each level takes one drafter pass."""
    width: int = 1
    """Number of children of a node; 1: a chain."""
    size: int = 0
    """Maximum number of nodes, the likeliest ones; 0: `depth`."""
    beam: int = 0
    """Maximum number of nodes of a level that are expanded, the likeliest ones; 0: `width`."""
    thresholds: DraftThresholds = DraftThresholds()

    def __post_init__(self) -> None:
        """Refuse shapes with more than MAX_NODES nodes: each node is a bit of a mask."""
        for name, value, least in (
            ("depth", self.depth, 1),
            ("width", self.width, 1),
            ("size", self.size, 0),
            ("beam", self.beam, 0),
        ):
            if not least <= value <= MAX_NODES:
                raise ConfigError(
                    f"speculation.{name} = {value}: it must be from {least} to {MAX_NODES}"
                )
        if self.num_expanded * (self.depth - 1) > MAX_NODES:
            raise ConfigError(
                f"speculation.width = {self.num_expanded} with depth = {self.depth}: width x "
                f"(depth - 1) nodes are expanded, at most {MAX_NODES}; lower one of them"
            )

    @property
    def num_nodes(self) -> int:
        """Maximum number of nodes of a draft."""
        return self.size or self.depth

    @property
    def num_expanded(self) -> int:
        """Maximum number of nodes of a level that are expanded."""
        return self.beam or self.width


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
