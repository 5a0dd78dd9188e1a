"""Sample-and-match verification: follow the target's own draws while the draft agrees.

The target draws a token at the root and at every node of a draft, each from its own distribution
with the keyed noise of the token's position. The request gets these draws with any draft; the draft
only decides how many of them one pass yields.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from longtail.speculation.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Result of verifying one draft.

    Example: Accepted(path=(1, 3), tokens=(5, 7, 8)): two nodes accepted, accept length 3
    """

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
