"""The draft budget: which of all proposed nodes are verified.

Nodes of all running requests compete by their probability of being reached. The N likeliest are
verified, with N such that tokens come quickest:

    maximise over N    (tokens without drafts + expected accepted(N)) / seconds(N)

Expected accepted nodes are the sum of the probabilities: a node is accepted if it is reached and
right. N = 0, plain decoding, is always a candidate. At the best N the last node yields as many
tokens as its seconds would yield otherwise, so N is a price too: the probability from which on a
node is worth its seconds. The price is found on a sample of drafts, and then each step's drafts are
bought at it, request by request.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree, keep_reached, prune, ranked

Seconds = Callable[[Int[np.ndarray, "n"]], Float[np.ndarray, "n"]]
"""Of the whole step, by the number of nodes verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBudget:
    """The best number of nodes.

    Example: DraftBudget(num_nodes=2, tokens_per_s=225.0)
    """

    num_nodes: int
    tokens_per_s: float
    """Expected."""


def optimal_budget(
    reach: Float[np.ndarray, "nodes"], scale: float, num_sampled: int, seconds: Seconds
) -> DraftBudget:
    """Choose how many of the nodes to verify, given falling probabilities.

    Each listed node stands for `scale` nodes: a sample of requests speaks for a whole batch.

    Example: probabilities (0.9, 0.8, 0.1), one request, steps of 10 ms + 1 ms a node: two nodes,
             2.7 tokens in 12 ms
    """
    counts = np.arange(len(reach) + 1)
    tokens = np.full(len(reach) + 1, float(num_sampled))
    np.cumsum(reach, out=tokens[1:])
    tokens[1:] *= scale
    tokens[1:] += num_sampled
    rates = tokens / seconds(np.rint(counts * scale).astype(np.int64))
    best = int(rates.argmax())
    return DraftBudget(
        num_nodes=best,
        tokens_per_s=float(rates[best]),
    )


def select_nodes(trees: Sequence[DraftTree], price: float, room: int) -> list[DraftTree]:
    """Cut the ranked drafts of a step to nodes of at least this probability, `room` at most.

    A draft that does not say how likely its nodes are stays whole, as far as there is room.
    """
    kept = [keep_reached(tree, price) for tree in trees]
    beyond = sum(tree.size for tree in kept) - room
    if beyond <= 0:
        return kept
    reach = sorted((p for tree in kept for p in tree.reach), reverse=True)
    fitting = reach[max(len(reach) - beyond, 0) :]
    if fitting:  # dearer than the dearest that has no room
        kept = [keep_reached(tree, math.nextafter(fitting[0], 2.0)) for tree in kept]
    left = room
    for place, tree in enumerate(kept):
        kept[place] = prune(tree, left)
        left -= kept[place].size
    return kept


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
