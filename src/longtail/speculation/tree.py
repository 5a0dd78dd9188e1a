r"""Draft trees: the proposal of a drafter for one request, and its verification.

The root is the request's last token. It is node 0 and not part of the draft. Nodes are numbered so
that a parent comes before its children. The example is used throughout:

    node      1   2   3   4             0 root
    token     a   b   c   d            / \
    parent    0   0   1   3           1a  2b
    depth     1   1   2   3           |
    visible   1  10 101 1101          3c             visible: bit i - 1 stands for node i
                                      |              (a node sees itself and its ancestors)
                                      4d

A chain is a tree in which each node is the parent of the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

MAX_NODES = 62
"""Maximum number of nodes: visibility is a signed 64-bit mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """A draft for one request; the root is not among its nodes.

    Example: DraftTree(tokens=(5, 6, 7, 8), parents=(0, 0, 1, 3), margins=(2.0, -2.0, 0.7, 1.1))
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    """parents[i] is the parent of node i + 1: a smaller node number, 0 for the root."""
    margins: tuple[float, ...]
    """Score of each node minus that of its best alternative, in nats; the argument of its
    confidence (`speculation.confidence`)."""
    reach: tuple[float, ...] = ()
    """Estimated probability that each node is accepted, in falling order (`ranked`). Empty if the
    drafter has no estimate."""

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return len(self.tokens)

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for an empty draft."""
        return max(depths(self.parents), default=0)


EMPTY = DraftTree(tokens=(), parents=(), margins=())


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return the distance of each node from the root. Results are cached, since shapes recur.

    Example: depths((0, 0, 1, 3)) == (1, 1, 2, 3)
    """
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return tuple(found[1:])


@lru_cache(maxsize=4096)
def visible_nodes(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Return a mask for each node of the nodes that it sees: its ancestors and itself.

    Bit i - 1 stands for node i.

    Example: visible_nodes((0, 0, 1, 3)) == (0b1, 0b10, 0b101, 0b1101)
    """
    masks = [0]
    for node, parent in enumerate(parents):
        masks.append(masks[parent] | (1 << node))
    return tuple(masks[1:])


def ranked(tree: DraftTree) -> DraftTree:
    """Sort nodes by falling probability, equal ones by number.

    A node is never likelier than its parent, so the result is a tree, and so is every prefix of
    it: the unlikeliest nodes are at the end.

    Example: the running example with reach (0.9, 0.1, 0.8, 0.7) is nodes 1, 3, 4, 2.
    """
    reach = tree.reach
    if all(a >= b for a, b in pairwise(reach)):
        return tree
    return _select(tree, sorted(range(tree.size), key=lambda i: -reach[i]))


def prune(tree: DraftTree, size: int) -> DraftTree:
    """Keep the first `size` nodes: the likeliest ones of a ranked tree."""
    if tree.size <= size:
        return tree
    return DraftTree(
        tokens=tree.tokens[:size],
        parents=tree.parents[:size],
        margins=tree.margins[:size],
        reach=tree.reach[:size],
    )


def keep_reached(tree: DraftTree, floor: float) -> DraftTree:
    """Keep the nodes of a ranked tree with at least probability `floor`; all without `reach`."""
    size = len(tree.reach)
    while size and tree.reach[size - 1] < floor:
        size -= 1
    return prune(tree, size) if tree.reach else tree


def cut_depth(tree: DraftTree, depth: int) -> DraftTree:
    """Keep the nodes of at most `depth`."""
    if tree.size <= depth:  # a tree is no deeper than its number of nodes
        return tree
    deep = depths(tree.parents)
    if max(deep) <= depth:
        return tree
    return _select(tree, [i for i, d in enumerate(deep) if d <= depth])


def _select(tree: DraftTree, kept: Sequence[int]) -> DraftTree:
    """Return the nodes at the indices `kept`, each after its parent, renumbered."""
    number = {0: 0} | {old + 1: new + 1 for new, old in enumerate(kept)}
    return DraftTree(
        tokens=tuple(tree.tokens[i] for i in kept),
        parents=tuple(number[tree.parents[i]] for i in kept),
        margins=tuple(tree.margins[i] for i in kept),
        reach=tuple(tree.reach[i] for i in kept) if tree.reach else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Result of verifying one draft."""

    path: tuple[int, ...]
    """Accepted nodes, from the root down."""
    tokens: tuple[int, ...]
    """Draws along the path, the root's first: the accepted nodes' tokens, then the bonus token."""


def accept(tree: DraftTree, drawn: Sequence[int]) -> Accepted:
    """Walk from the root, following the target's own draws while the draft agrees.

    `drawn[i]` is the target's draw at node i, `drawn[0]` that at the root. Lossless for any draft:
    target and keyed noise alone determine the draws (Gumbel-max). Of siblings with the same token
    the first is followed.

    Example: tokens (5, 6, 7), parents (0, 0, 1), drawn (5, 7, 9, 8):
             path (1, 3), tokens (5, 7, 8), the last of them the bonus token.
    """
    if not tree.tokens:  # every request of a plain step
        return Accepted(path=(), tokens=(drawn[0],))
    children: dict[tuple[int, int], int] = {}
    for node, place in enumerate(zip(tree.parents, tree.tokens, strict=True), start=1):
        children.setdefault(place, node)
    path: list[int] = []
    tokens = [drawn[0]]
    node = 0
    while (node := children.get((node, tokens[-1]), 0)) > 0:
        path.append(node)
        tokens.append(drawn[node])
    return Accepted(path=tuple(path), tokens=tuple(tokens))


def follow(tree: DraftTree, tokens: Sequence[int]) -> Accepted:
    """Return the path of `tree` that agrees with `tokens`, the tokens after the root.

    The tree need not be the verified one: the result of any draft is known.

    Example: follow(DraftTree(tokens=(5, 6, 7), parents=(0, 0, 1), ...), [5, 7]) has path (1, 3)
    """
    path: list[int] = []
    at = 0
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True), start=1):
        if parent == at and len(path) < len(tokens) and token == tokens[len(path)]:
            path.append(node)
            at = node
    return Accepted(path=tuple(path), tokens=tuple(tokens))
