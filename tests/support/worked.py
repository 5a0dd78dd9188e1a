"""A worked example of sampling, computed by hand, for tests and documents.

A model gives five tokens the probabilities PROBS after some context. Each truncation keeps:

    token            0      1      2      3      4
    PROBS            0.40   0.30   0.15   0.10   0.05
    top_k = 3        8/17   6/17   3/17   -      -         the three best
    top_p = 0.8      8/17   6/17   3/17   -      -         0.40 + 0.30 < 0.8, token 2 crosses
    min_p = 0.3      8/17   6/17   3/17   -      -         0.3 * 0.40 = 0.12 <= 0.15
    all of COMBINED  4/7    3/7    -      -      -         see below
    temperature 0.5  64/114 36/114 9/114  4/114  1/114     squares, renormalised

COMBINED is top_k = 4, top_p = 0.8, min_p = 0.5. top_k keeps (40, 30, 15, 10) / 95; the sums before
each are (0, 40, 70, 85) / 95 and 0.8 is 76 / 95, so top_p keeps three; min_p keeps those of at
least half of the best, and 15 / 40 is less.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction

from longtail.speculation.confidence import EDGES, ConfidenceCurve
from longtail.speculation.tree import Accepted, DraftTree
from longtail.types import SamplingParams

PROBS = (0.40, 0.30, 0.15, 0.10, 0.05)
COMBINED = SamplingParams(top_k=4, top_p=0.8, min_p=0.5)

_THREE = (Fraction(8, 17), Fraction(6, 17), Fraction(3, 17), Fraction(0), Fraction(0))
LEFT = (
    (SamplingParams(), tuple(map(Fraction, ("0.40", "0.30", "0.15", "0.10", "0.05")))),
    (SamplingParams(top_k=3), _THREE),
    (SamplingParams(top_p=0.8), _THREE),
    (SamplingParams(min_p=0.3), _THREE),
    (COMBINED, (Fraction(4, 7), Fraction(3, 7), Fraction(0), Fraction(0), Fraction(0))),
    (SamplingParams(temperature=0.5), tuple(Fraction(n, 114) for n in (64, 36, 9, 4, 1))),
    (SamplingParams(temperature=0.0), tuple(map(Fraction, (1, 0, 0, 0, 0)))),
)
"""Parameters, and the part of PROBS that they keep."""

NOISE = (-0.5, 0.25, 0.75, 0.25, 2.0)
"""Noise at one position: log PROBS + NOISE = (-1.42, -0.95, -1.15, -2.05, -1.00)."""
DRAWN = 1

# Speculation: the tree drawn in longtail/speculation/tree.py, a, b, c, d = 5, 6, 7, 8.
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


def confidences(curve: ConfidenceCurve, margins: Sequence[float]) -> list[float]:
    """Return the confidence of each node given that its parent is right."""
    return [curve.table()[bisect_right(EDGES, margin)] for margin in margins]


def reach_probabilities(parents: Sequence[int], confidences: Sequence[float]) -> tuple[float, ...]:
    """Return the probability that each node is accepted: the product along its path."""
    found = [1.0]
    for parent, confidence in zip(parents, confidences, strict=True):
        found.append(found[parent] * confidence)
    return tuple(found[1:])
