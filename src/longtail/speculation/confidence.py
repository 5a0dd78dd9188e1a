"""How sure a drafter may be of a node: a function of its margin, learned from verification.

With coupled drafting the chance that a child is right is not its probability q(v): the noise is
known, so what matters is by how much the child's perturbed score leads the other candidates'. That
function differs between drafters and drifts with the policy, so it is kept as a table of margins,
counted online: whenever verification reaches a node's parent, it reveals whether the node is right.

It owns counts. Whether the margin was taken with or without noise is the drafter's business.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import final

from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted

EDGES = (-8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Bounds of the bins of margins, nats."""
_CENTERS = (-10.0, *((a + b) / 2 for a, b in pairwise(EDGES)), 14.0)
_PRIOR_WEIGHT = 8.0
"""Observations that the prior, sigmoid(margin), counts as."""
_MEMORY = 4000.0
"""Observations after which a bin forgets as fast as it learns."""


@final
class ConfidenceCurve:
    """Probability that a node is right given that its parent is, by bin of margin.

    `calibration_error` is taken before each outcome is learned, so it is honest: the mean of
    |predicted - observed| over the bins of what was predicted, weighted by their counts (expected
    calibration error, Naeini et al. 2015), with ten bins.
    """

    def __init__(self) -> None:
        prior = [1.0 / (1.0 + math.exp(-center)) for center in _CENTERS]
        self._hits = [_PRIOR_WEIGHT * p for p in prior]
        self._trials = [_PRIOR_WEIGHT] * len(prior)
        self._table = list(prior)
        self._predicted = [0.0] * 10
        self._observed = [0] * 10
        self._counts = [0] * 10

    def table(self) -> list[float]:
        """Confidence of each bin; bin i holds margins from EDGES[i - 1] up to EDGES[i]."""
        return self._table

    def confidences(self, margins: Sequence[float]) -> list[float]:
        """Confidence of each node given that its parent is right."""
        table = self._table
        return [table[bisect_right(EDGES, margin)] for margin in margins]

    def learn(self, tree: DraftTree, accepted: Accepted) -> None:
        """Count every node of which is known whether it is right: its parent is, and so is said
        what came after (`verify.follow` says so of nodes that were not verified, too).
        """
        right = set(accepted.path)
        parents = {0, *accepted.path[: len(accepted.tokens) - 1]}
        for node, parent in enumerate(tree.parents, start=1):
            if parent in parents:
                self._count(tree.margins[node - 1], hit=node in right)

    def _count(self, margin: float, *, hit: bool) -> None:
        index = bisect_right(EDGES, margin)
        predicted = self._table[index]
        place = min(int(predicted * 10), 9)
        self._predicted[place] += predicted
        self._observed[place] += hit
        self._counts[place] += 1
        if self._trials[index] >= _MEMORY:
            self._hits[index] *= 1 - 1 / _MEMORY
            self._trials[index] *= 1 - 1 / _MEMORY
        self._hits[index] += hit
        self._trials[index] += 1
        self._table[index] = self._hits[index] / self._trials[index]

    def calibration_error(self) -> float:
        """Expected calibration error of what was predicted so far; 0 before anything was."""
        total = sum(self._counts)
        if not total:
            return 0.0
        gaps = (abs(p - o) for p, o in zip(self._predicted, self._observed, strict=True))
        return math.fsum(gaps) / total
