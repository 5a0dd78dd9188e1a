"""The shape of a draft, and what a node must promise to be in it.

    depth 3, width 2, beam 1                depth 3, width 2 (beam 2)

          0                                        0
         / \\                                      / \
        1   2                                    1   2
       / \\                                     / |   | \
      3   4                                   3  4   5  6      two of these are drafted on
     / \\                                     ...

A beam of 1 costs one row of the drafter a level, whatever the width: the second-best token is
known anyway, so it costs its verification only.
"""

from dataclasses import dataclass

from longtail.errors import ConfigError
from longtail.speculation.tree import MAX_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftThresholds:
    """What a node must promise, as probabilities of being reached; 0 demands nothing.

    Example: DraftThresholds(verify=0.3, expand=0.4, level=1.5)
    """

    verify: float = 0.0
    """Nodes less likely than this are left out of the draft."""
    expand: float = 0.0
    """Nodes less likely than this are not drafted on."""
    level: float = 0.0
    """Another level is drafted if what its parents' probabilities have over `extend` sums to this,
    over all requests: a pass of the drafter has a price of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The shape of a draft, the same for every request.

    Example: Strategy(depth=6, width=1, size=6) is a chain of six
    """

    depth: int
    """Longest path; one drafter pass a level."""
    width: int = 1
    """Children of a node; 1 is a chain."""
    size: int = 0
    """Nodes of a draft, the likeliest to be reached; 0 is `depth`."""
    beam: int = 0
    """Nodes of a level that are drafted on, the likeliest; 0 is `width`."""
    thresholds: DraftThresholds = DraftThresholds()

    def __post_init__(self) -> None:
        """Refuse shapes that have no room: a draft's nodes are bits of one mask, and slots."""
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
                f"(depth - 1) nodes are drafted on, at most {MAX_NODES}; lower one of them"
            )

    @property
    def num_nodes(self) -> int:
        """Most nodes of a draft."""
        return self.size or self.depth

    @property
    def num_expanded(self) -> int:
        """Most nodes of a level that are drafted on."""
        return self.beam or self.width
