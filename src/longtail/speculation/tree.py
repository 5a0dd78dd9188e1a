"""Draft trees: what a drafter proposes for one request, and what attention must know of it.

One running example. The root is the request's last token, whose successor nobody knows yet; it is
node 0 and no part of the draft. Nodes are numbered so that a parent comes before its children.

    node      1   2   3   4             0 root
    token     a   b   c   d            / \
    parent    0   0   1   3           1a  2b
    depth     1   1   2   3           |
    visible   1  10 101 1101          3c             visible: bit i - 1 stands for node i
                                      |              (a node sees itself and its ancestors)
                                      4d

A chain is the tree whose every node is the parent of the next; nothing treats it apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

MAX_NODES = 62
"""Visibility is a signed 64-bit mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """A proposal for one request; the root is not among the nodes.

    Example: DraftTree(tokens=(5, 6, 7, 8), parents=(0, 0, 1, 3), margins=(2.0, -2.0, 0.7, 1.1))
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """parents[i] is the parent of node i + 1: a smaller node number, 0 for the root."""
    margins: tuple[float, ...]
    """Score of the node less that of its best rival for the same place, nats; what its confidence
    is a function of (`speculation.confidence`)."""
    reach: tuple[float, ...] = ()
    """Probability, when it was drafted, that verification reaches the node and finds it right, in
    falling order (`ranked`). Empty: the drafter does not say."""

    @property
    def size(self) -> int:
        """Nodes, the root excluded."""
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty draft."""
        return max(depths(self.parents), default=0)


EMPTY = DraftTree(tokens=(), parents=(), margins=())


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Distance of each node from the root. Shapes recur, so they are remembered.

    Example: depths((0, 0, 1, 3)) == (1, 1, 2, 3)
    """
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found[1:])


@lru_cache(maxsize=4096)
def visible_nodes(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Mask of the nodes that each node sees: its ancestors and itself; bit i - 1 is node i.

    Example: visible_nodes((0, 0, 1, 3)) == (0b1, 0b10, 0b101, 0b1101)
    """
    masks = [0]
    for node, parent in enumerate(parents):
        masks.append(masks[parent] | (1 << node))
    return tuple(masks[1:])


def reach_probabilities(parents: Sequence[int], confidences: Sequence[float]) -> list[float]:
    """Probability that verification gets as far as each node: the product along its path.

    Example: reach_probabilities((0, 0, 1), (0.9, 0.1, 0.5)) == [0.9, 0.1, 0.45]
    """
    found = [1.0]
    for parent, confidence in zip(parents, confidences, strict=True):
        found.append(found[parent] * confidence)
    return found[1:]


def ranked(tree: DraftTree) -> DraftTree:
    """Put nodes in falling order of probability, of equals the earlier first.

    A node is never likelier than its parent and comes after it, so this is a tree, and so is every
    beginning of it: whatever is to be left out for being unlikely is at the end.

    Example: the running example with reach (0.9, 0.1, 0.8, 0.7) is nodes 1, 3, 4, 2.
    """
    reach = tree.reach
    if all(a >= b for a, b in pairwise(reach)):
        return tree
    return _select(tree, sorted(range(tree.size), key=lambda i: -reach[i]))


def prune(tree: DraftTree, size: int) -> DraftTree:
    """Keep the first `size` nodes: of a ranked tree, those likeliest to be reached."""
    if tree.size <= size:
        return tree
    return DraftTree(
        tokens=tree.tokens[:size],
        parents=tree.parents[:size],
        margins=tree.margins[:size],
        reach=tree.reach[:size],
    )


def keep_reached(tree: DraftTree, floor: float) -> DraftTree:
    """Keep nodes of a ranked tree that are reached with probability `floor` or more.

    A tree that does not say stays whole.
    """
    size = len(tree.reach)
    while size and tree.reach[size - 1] < floor:
        size -= 1
    return prune(tree, size) if tree.reach else tree


def cut_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Keep the nodes down to `depth`."""
    if tree.size <= depth:  # no deeper than it has nodes
        return tree
    deep = depths(tree.parents)
    if max(deep) <= depth:
        return tree
    return _select(tree, [i for i, d in enumerate(deep) if d <= depth])


def _select(tree: DraftTree, kept: Sequence[int]) -> DraftTree:
    """Take the nodes at `kept` (indices), every one behind its parent, and renumber them."""
    number = {0: 0} | {old + 1: new + 1 for new, old in enumerate(kept)}
    return DraftTree(
        tokens=tuple(tree.tokens[i] for i in kept),
        parents=tuple(number[tree.parents[i]] for i in kept),
        margins=tuple(tree.margins[i] for i in kept),
        reach=tuple(tree.reach[i] for i in kept) if tree.reach else (),
    )
