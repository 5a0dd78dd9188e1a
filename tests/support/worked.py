"""A worked example of speculation, and what trees of any shape are compared with."""

from bisect import bisect_right
from collections.abc import Sequence

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.tree import Accepted, DraftTree

# The tree drawn in longtail/speculation/tree.py, a, b, c, d = 5, 6, 7, 8.
#
#     node      1   2   3   4              0 root
#     token     5   6   7   8             / \
#     parent    0   0   1   3            1   2         verification draws 5 at the root, so node 1
#     depth     1   1   2   3            |             is right; 7 after it, so node 3 is; then 4,
#     reach    .9  .1  .8  .7            3             which is not drafted: it is the bonus
#                                        |
#                                        4
TREE = DraftTree(tokens=(5, 6, 7, 8), parents=(0, 0, 1, 3), margins=(2.0, -2.0, 0.7, 1.1))
TREE_VISIBLE = (0b1, 0b10, 0b101, 0b1101)
TREE_REACH = (0.9, 0.1, 0.8, 0.7)
TREE_DRAWN = (5, 7, 9, 4, 8)
"""Tokens that the target draws at the root and at each node."""
TREE_ACCEPTED = Accepted(path=(1, 3), tokens=(5, 7, 4))


def chain(
    tokens: Sequence[int], reach: Sequence[float] = (), margins: Sequence[float] = ()
) -> DraftTree:
    """Return a chain; its margins are 0 unless given."""
    size = len(tokens)
    margins = tuple(margins) or (0.0,) * size
    parents = tuple(range(size))
    return DraftTree(tokens=tuple(tokens), parents=parents, margins=margins, reach=tuple(reach))


def confidences(curve: ConfidenceCurve, margins: Sequence[float]) -> list[float]:
    """Return the confidence of each node given that its parent is right."""
    return [curve.table()[bisect_right(EDGES, margin)] for margin in margins]


def reach_probabilities(parents: Sequence[int], confidences: Sequence[float]) -> tuple[float, ...]:
    """Return the probability that each node is accepted: the product along its path."""
    found = [1.0]
    for parent, confidence in zip(parents, confidences, strict=True):
        found.append(found[parent] * confidence)
    return tuple(found[1:])
