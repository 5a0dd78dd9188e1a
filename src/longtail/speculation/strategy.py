r"""The shape of a draft, and the thresholds for its nodes.

    depth 3, width 2, beam 1                depth 3, width 2 (beam 2)

          0                                        0
         / \                                      / \
        1   2                                    1   2
       / \                                     / |   | \
      3   4                                   3  4   5  6      two of these are expanded
     / \                                     ...

A beam of 1 costs one row of the drafter per level for any width: the second-best token is known
anyway, and costs only its verification.
"""

from dataclasses import dataclass

from longtail.errors import ConfigError
from longtail.speculation.tree import MAX_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftThresholds:
    """Minimum probabilities of nodes; 0: no threshold."""

    verify: float = 0.0
    """Minimum probability of a node of the draft."""
    expand: float = 0.0
    """Minimum probability of a node whose children are drafted."""
    level: float = 0.0
    """Minimum of the sum of (probability - `expand`) over the parents of another level, in all
    requests: the fixed cost of a drafter pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The shape of a draft, the same for every request."""

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
