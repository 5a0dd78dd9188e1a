"""Growing level by level: what holds for every draft."""

from collections import Counter
from collections.abc import Sequence
from typing import final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.drafter import Draftable
from longtail.speculation.grow import Frontier, Scoring, Walker, grow
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import MAX_NODES, Accepted, DraftTree, depths
from support.engine_requests import draftable
from support.worked import confidences, reach_probabilities

VOCAB = 5


def logits_after(request: int, path: tuple[int, ...]) -> Tensor:
    """Scores after a path: arbitrary numbers, up to some nats apart."""
    seed = hash((request, path)) % 2**31
    return 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


@final
class PathWalker(Walker):
    """Knows of every node by which tokens it was reached; remembers how wide its passes were."""

    def __init__(self, requests: int) -> None:
        self._paths: list[list[tuple[int, ...]]] = [[()] for _ in range(requests)]
        self.passes: list[int] = []

    def root(self) -> Float[Tensor, "requests vocab"]:
        return self._scores()

    def descend(self, frontier: Frontier) -> Float[Tensor, "nodes vocab"]:
        shape = (len(self._paths), frontier.per_request)
        tokens, parents = frontier.tokens.view(shape), frontier.parents.view(shape)
        self._paths = [
            [(*above[parent], token) for token, parent in zip(some, by, strict=True)]
            for above, some, by in zip(self._paths, tokens.tolist(), parents.tolist(), strict=True)
        ]
        assert {len(path) for paths in self._paths for path in paths} == {frontier.depth}
        self.passes.append(frontier.per_request)
        return self._scores()

    def _scores(self) -> Tensor:
        paths = [(number, path) for number, some in enumerate(self._paths) for path in some]
        return torch.stack([logits_after(number, path) for number, path in paths])


def asked(max_depths: Sequence[int]) -> list[Draftable]:
    return [
        draftable(str(number), [1, 2], max_depth=max_depth)
        for number, max_depth in enumerate(max_depths)
    ]


def grown(
    max_depths: Sequence[int], strategy: Strategy, curve: ConfidenceCurve
) -> tuple[list[DraftTree], list[int]]:
    """The drafts, and how many nodes of a request each pass but the first was over."""
    walker = PathWalker(len(max_depths))
    scoring = Scoring(requests=asked(max_depths), noise=None)
    trees = grow(walker, scoring, strategy, curve)
    return trees, walker.passes


WORTHS = st.builds(
    lambda verify, extend, level: DraftThresholds(verify=verify, expand=extend, level=level),
    st.sampled_from((0.0, 0.05, 0.3)),
    st.sampled_from((0.0, 0.2, 0.5)),
    st.sampled_from((0.0, 0.4, 1.5)),
)
STRATEGIES = st.builds(
    lambda depth, width, size, beam, worth: Strategy(
        depth=depth, width=width, size=size, beam=beam, thresholds=worth
    ),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(0, 4),
    WORTHS,
)
OUTCOMES = st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=30)


def taught(outcomes: Sequence[tuple[float, bool]]) -> ConfidenceCurve:
    curve = ConfidenceCurve()
    for margin, right in outcomes:
        tree = DraftTree(tokens=(5,), parents=(0,), margins=(margin,))
        curve.learn(tree, Accepted(path=(1,) if right else (), tokens=(5, 6) if right else (6,)))
    return curve


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), STRATEGIES, OUTCOMES)
def test_any_draft_keeps_to_its_strategy(max_depths, strategy, outcomes):
    """parity/test_draft.py compares the nodes with those of draft.c."""
    curve, worth = taught(outcomes), strategy.thresholds
    trees, passes = grown(max_depths, strategy, curve)
    for tree, max_depth in zip(trees, max_depths, strict=True):
        assert tree.size <= strategy.num_nodes
        assert max(depths(tree.parents), default=0) <= min(strategy.depth, max_depth)
        assert max(Counter(tree.parents).values(), default=0) <= strategy.width
        found = reach_probabilities(tree.parents, confidences(curve, tree.margins))
        assert tree.reach == pytest.approx(found, rel=1e-12)
        assert list(tree.reach) == sorted(tree.reach, reverse=True)
        assert all(reach >= worth.verify for reach in tree.reach)
        assert all(tree.reach[parent - 1] >= worth.expand for parent in tree.parents if parent)
    assert sum(passes) <= MAX_NODES
    assert max(passes, default=1) <= strategy.num_expanded


def test_a_beam_of_one_is_a_chain_with_siblings():
    strategy = Strategy(depth=3, width=2, beam=1, size=6)
    (tree,), passes = grown([9], strategy, ConfidenceCurve())
    (chain,), _ = grown([9], Strategy(depth=3), ConfidenceCurve())
    spine = [node for node in range(1, 7) if tree.margins[node - 1] > 0]
    assert tuple(tree.tokens[node - 1] for node in spine) == chain.tokens
    assert [tree.parents[node - 1] for node in spine] == [0, *spine[:-1]]
    leaves = {
        depth: margin
        for depth, margin in zip(depths(tree.parents), tree.margins, strict=True)
        if margin < 0
    }
    assert leaves == {depth: -margin for depth, margin in enumerate(chain.margins, start=1)}
    assert passes == [1, 1]  # and the root's


def test_no_pass_is_made_where_none_is_worth_it():
    """A pass costs the same for one request as for two, so two may be worth what one is not."""
    curve = ConfidenceCurve()
    (one, two), _ = grown([9, 9], Strategy(depth=1), curve)
    promises = [one.reach[0], two.reach[0]]
    level = (max(promises) + sum(promises)) / 2
    strategy = Strategy(depth=2, thresholds=DraftThresholds(level=level))
    assert grown([9, 9], strategy, curve)[1] == [1]
    assert grown([9], strategy, curve)[1] == []
    assert grown([9, 1], strategy, curve)[1] == []  # the second could not use it
    extend = DraftThresholds(expand=max(promises) * 1.001)
    assert grown([9, 9], Strategy(depth=2, thresholds=extend), curve)[1] == []
