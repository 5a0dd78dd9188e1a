"""Calibrated confidences of draft nodes, learned from verification.

With coupled drafting the probability that a child is right is not q(v): the noise is known, so it
depends on the margin by which the child's perturbed score exceeds the other candidates' scores.
This function differs between drafters and changes with the policy. It is a table by margin, counted
online: when verification reaches a node's parent, it shows whether the node is right.

The prior of every bin is hierarchical: sigmoid(margin), times the drafter's trust over all bins.
So about ten outcomes in all reveal an overconfident drafter, and an empty bin uses its drafter's
trust. Drafters choose whether margins include noise.
"""

import math
from bisect import bisect_right
from itertools import pairwise
from typing import final

from longtail.speculation.tree import Accepted, DraftTree

EDGES = (-8.0, -4.0, -2.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Bounds of the bins of margins, nats."""
_CENTERS = (-10.0, *((a + b) / 2 for a, b in pairwise(EDGES)), 14.0)
_HIGHEST = 0.999
"""Maximum confidence: it limits the depth of drafts."""
_SIGMOID = tuple(min(1.0 / (1.0 + math.exp(-center)), _HIGHEST) for center in _CENTERS)
_BINS = range(len(_CENTERS))
_PRIOR_WEIGHT = 8.0
"""Weight of a bin's prior, in observations."""
_TRUST_WEIGHT = 2.0
"""Weight of the initial trust 1, in right nodes."""
_MEMORY = 1000.0
"""Maximum weight of a bin's observations, and of the trust's; older ones fade."""


@final
class ConfidenceCurve:
    """Probability that a node is right given that its parent is, by bin of margin.

        confidence = (hits + w * sigmoid * trust) / (trials + w)                       of the bin
        trust      = (hits + 2) / (sum of sigmoid over trials + 2)                 over all bins

    `learn` only counts; the table is computed at the next use.
    """

    def __init__(self) -> None:
        self._table = list(_SIGMOID)
        self._hits, self._trials = [0.0] * len(_BINS), [0.0] * len(_BINS)
        self._all_hits = self._all_trials = self._all_expected = 0.0
        # Counts since the table was computed.
        self._new_hits, self._new_trials = [0] * len(_BINS), [0] * len(_BINS)
        self._is_stale = False

    def table(self) -> list[float]:
        """Return the confidence of each bin; bin i holds margins from EDGES[i - 1] to EDGES[i]."""
        if self._is_stale:
            self._update()
        return self._table

    def learn(self, tree: DraftTree, accepted: Accepted) -> None:
        """Count every node whose parent is right and whose next token is known.

        `tree.follow` also judges nodes that were not verified.
        """
        if not tree.margins or not accepted.tokens:
            return
        path, margins, place = accepted.path, tree.margins, bisect_right
        hits, trials = self._new_hits, self._new_trials
        self._is_stale = True
        parents = {0, *path[: len(accepted.tokens) - 1]}
        for node, parent in enumerate(tree.parents):
            if parent in parents:
                trials[place(EDGES, margins[node])] += 1
        for node in path:
            hits[place(EDGES, margins[node - 1])] += 1

    def _update(self) -> None:
        """Compute a new table with the new counts."""
        for index in _BINS:
            trials, hits = self._new_trials[index], self._new_hits[index]
            if not trials:
                continue
            self._new_trials[index] = self._new_hits[index] = 0
            fade = _fade(self._trials[index] + trials)
            self._hits[index] = (self._hits[index] + hits) * fade
            self._trials[index] = (self._trials[index] + trials) * fade
            self._all_hits += hits
            self._all_trials += trials
            self._all_expected += _SIGMOID[index] * trials
        fade = _fade(self._all_trials)
        self._all_hits, self._all_trials = self._all_hits * fade, self._all_trials * fade
        self._all_expected *= fade
        trust = (self._all_hits + _TRUST_WEIGHT) / (self._all_expected + _TRUST_WEIGHT)
        self._table = [
            min(
                (hits + _PRIOR_WEIGHT * min(prior * trust, _HIGHEST)) / (trials + _PRIOR_WEIGHT),
                _HIGHEST,
            )
            for prior, hits, trials in zip(_SIGMOID, self._hits, self._trials, strict=True)
        ]
        self._is_stale = False


def _fade(trials: float) -> float:
    """Return the factor that reduces `trials` to at most _MEMORY."""
    return min(1.0, _MEMORY / trials) if trials else 1.0
