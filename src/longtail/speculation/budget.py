"""The draft budget: the number of proposed nodes to verify, and their selection.

Nodes of all running requests compete by their probability of being accepted. The N likeliest are
verified, with N such that the token rate is highest:

    maximise over N    (tokens without drafts + expected accepted(N)) / seconds(N)

The expected number of accepted nodes is the sum of their probabilities. N = 0, plain decoding, is a
candidate. At the optimum the marginal node yields as many tokens per second as the whole step. The
rate there is computed on a sample of drafts. That rate converts the time of a step to tokens,
by which each step chooses the number of nodes for its own drafts (`best_count`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree, keep_reached, prune, ranked

Seconds = Callable[[Int[np.ndarray, "n"]], Float[np.ndarray, "n"]]
"""Seconds of a step by its number of verified nodes."""


def optimal_budget(
    reach: Float[np.ndarray, "nodes"], scale: float, num_sampled: int, seconds: Seconds
) -> tuple[int, float]:
    """Return the optimal number of nodes, and the expected tokens per second with them.

    `reach` holds their probabilities in falling order. Each one stands for `scale` nodes: the
    sample of requests represents the batch.

    Example: probabilities (0.9, 0.8, 0.1), one request, steps of 10 ms + 1 ms a node: two nodes,
             2.7 tokens in 12 ms, 225 tokens/s
    """
    counts = np.arange(len(reach) + 1)
    tokens = np.full(len(reach) + 1, float(num_sampled))
    np.cumsum(reach, out=tokens[1:])
    tokens[1:] *= scale
    tokens[1:] += num_sampled
    rates = tokens / seconds(np.rint(counts * scale).astype(np.int64))
    best = int(rates.argmax())
    return best, float(rates[best])


def best_count(reach: Float[np.ndarray, "nodes"], rate: float, seconds: Seconds) -> int:
    """Return how many nodes yield most, beyond the tokens that other steps make in their time.

    `reach` holds their probabilities in falling order, `rate` is the tokens per second otherwise.

    Example: probabilities (0.9, 0.5, 0.4), 200 tokens/s, blocks of two rows of 6 ms, the step's own
             row first: one node, since 0.9 is free, but 0.5 + 0.4 are less than the 1.2 of a block
    """
    tokens = np.zeros(len(reach) + 1)
    np.cumsum(reach, out=tokens[1:])
    return int((tokens - rate * seconds(np.arange(len(reach) + 1))).argmax())


def select_nodes(trees: Sequence[DraftTree], room: int) -> list[DraftTree]:
    """Return the `room` likeliest nodes of ranked drafts.

    A draft without probabilities is cut only where room ends.
    """
    kept = list(trees)
    beyond = sum(tree.size for tree in kept) - room
    if beyond <= 0:
        return kept
    reach = sorted((p for tree in kept for p in tree.reach), reverse=True)
    fitting = reach[max(len(reach) - beyond, 0) :]
    if fitting:  # above the likeliest node without room
        kept = [keep_reached(tree, math.nextafter(fitting[0], 2.0)) for tree in kept]
    left = room
    for place, tree in enumerate(kept):
        kept[place] = prune(tree, left)
        left -= kept[place].size
    return kept


def merge(trees: Sequence[DraftTree]) -> DraftTree:
    """Merge several drafters' drafts for one request to the MAX_NODES likeliest nodes.

    A node proposed by several drafters gets the highest of its probabilities.
    """
    proposed = [tree for tree in trees if tree.size]
    if len(proposed) <= 1:
        return proposed[0] if proposed else EMPTY
    numbers: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    margins: list[float] = []
    reach: list[float] = []
    for tree in proposed:
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
