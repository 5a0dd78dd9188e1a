"""The draft budget: which of all proposed nodes are verified.

Nodes of all running requests compete by their probability of being reached. The N likeliest are
verified, with N such that tokens come quickest:

    maximise over N    (tokens without drafts + expected accepted(N)) / seconds(N)

Expected accepted nodes are the sum of the probabilities: a node is accepted if it is reached and
right. N = 0, plain decoding, is always a candidate.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree, keep_reached, prune, ranked

Seconds = Callable[[Int[np.ndarray, "n"]], Float[np.ndarray, "n"]]
"""Of the whole step, by the number of nodes verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The best number of nodes.

    Example: Spending(num_nodes=2, floor=0.8, tokens_per_s=290.0)
    """

    num_nodes: int
    floor: float
    """The least probability among them; 1 if there are none."""
    tokens_per_s: float
    """Expected."""


def best_spending(
    reach: Float[np.ndarray, "nodes"], scale: float, num_drawing: int, seconds: Seconds
) -> Spending:
    """Choose how many of the nodes to verify, given falling probabilities.

    Each listed node stands for `scale` nodes: a sample of requests speaks for a whole batch.

    Example: probabilities (0.9, 0.8, 0.1), one request, steps of 10 ms + 1 ms a node: two nodes,
             2.7 tokens in 12 ms
    """
    counts = np.arange(len(reach) + 1)
    tokens = np.full(len(reach) + 1, float(num_drawing))
    np.cumsum(reach, out=tokens[1:])
    tokens[1:] *= scale
    tokens[1:] += num_drawing
    rates = tokens / seconds(np.rint(counts * scale).astype(np.int64))
    best = int(rates.argmax())
    return Spending(
        num_nodes=best,
        floor=float(reach[best - 1]) if best else 1.0,
        tokens_per_s=float(rates[best]),
    )


def spend(
    trees: Sequence[DraftTree], room: int, num_drawing: int, seconds: Seconds
) -> list[DraftTree]:
    """Cut the drafts of a step to the nodes that pay, `room` at most.

    A draft that does not say how likely its nodes are stays whole, as far as there is room.
    """
    silent = sum(tree.size for tree in trees if not tree.reach)
    room = max(room - silent, 0)
    reach = np.array([p for tree in trees for p in tree.reach])
    reach.sort()
    falling = reach[::-1]
    found = best_spending(falling[:room], 1.0, num_drawing, lambda counts: seconds(counts + silent))
    if found.num_nodes == len(reach):
        return list(trees)
    if not found.num_nodes:
        return [EMPTY if tree.reach else tree for tree in trees]
    floor = found.floor
    if falling[found.num_nodes] == floor:  # equals beyond the room: none of them, or all
        floor = float(np.nextafter(floor, 2.0))
    return [keep_reached(tree, floor) for tree in trees]


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Join several drafters' drafts for one request; what several propose is there once.

    It is as likely as the surer of them says. Of more than MAX_NODES the likeliest stay.
    """
    speaking = [tree for tree in trees if tree.size]
    if len(speaking) <= 1:
        return speaking[0] if speaking else EMPTY
    numbers: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    margins: list[float] = []
    reach: list[float] = []
    for tree in speaking:
        renumbered = [0]
        likely = tree.reach or (1.0,) * tree.size
        for token, above, margin, sure in zip(
            tree.tokens, tree.parents, tree.margins, likely, strict=True
        ):
            parent = renumbered[above]
            number = numbers.get((parent, token))
            if number is None:
                tokens.append(token)
                parents.append(parent)
                margins.append(margin)
                reach.append(sure)
                number = numbers[parent, token] = len(tokens)
            else:
                reach[number - 1] = max(reach[number - 1], sure)
            renumbered.append(number)
    joined = DraftTree(
        tokens=tuple(tokens), parents=tuple(parents), margins=tuple(margins), reach=tuple(reach)
    )
    return prune(ranked(joined), MAX_NODES)
