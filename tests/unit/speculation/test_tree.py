"""Draft trees and their verification: the running example, and what holds for every tree."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.tree import (
    EMPTY,
    DraftTree,
    accept,
    cut_depth,
    depths,
    keep_reached,
    prune,
    ranked,
    visible_nodes,
)
from support.worked import (
    TREE,
    TREE_ACCEPTED,
    TREE_DRAWN,
    TREE_REACH,
    TREE_VISIBLE,
    reach_probabilities,
)


@st.composite
def any_parents(draw: st.DrawFn) -> tuple[int, ...]:
    """Parents of a tree of any shape; the record is made outside, its checks use `random`."""
    return tuple(draw(st.integers(0, node)) for node in range(draw(st.integers(0, 24))))


def tree_of(parents: tuple[int, ...]) -> DraftTree:
    """A tree whose node i has token 100 + i, to be recognised when it is renumbered."""
    size = len(parents)
    return DraftTree(
        tokens=tuple(range(101, 101 + size)),
        parents=parents,
        margins=tuple(float(node) for node in range(size)),
    )


def parent_tokens(tree: DraftTree) -> dict[int, int]:
    """Token of each node's parent by the node's token; the root's is 0."""
    tokens = (0, *tree.tokens)
    return {token: tokens[parent] for token, parent in zip(tree.tokens, tree.parents, strict=True)}


def ancestors(parents: tuple[int, ...], node: int) -> set[int]:
    """A node and all above it, the root excluded."""
    return {node} | ancestors(parents, parents[node - 1]) if node else set()


def test_a_floor_keeps_likely_nodes_and_trees_without_probabilities():
    likely = ranked(replace(TREE, reach=TREE_REACH))
    assert keep_reached(likely, 0.7) == prune(likely, 3)
    assert keep_reached(likely, 0.71) == prune(likely, 2)
    assert keep_reached(likely, 0.95) == EMPTY
    assert keep_reached(TREE, 0.95) is TREE


@given(any_parents())
def test_a_node_sees_itself_and_its_ancestors_alone(parents):
    for node, mask in enumerate(visible_nodes(parents), start=1):
        seen = {other for other in range(1, len(parents) + 1) if mask >> (other - 1) & 1}
        assert seen == ancestors(parents, node)
        assert len(seen) == depths(parents)[node - 1]
    assert visible_nodes(TREE.parents) == TREE_VISIBLE


@given(any_parents(), st.integers(0, 30), st.data())
def test_pruning_keeps_a_tree_of_the_likeliest_nodes(parents, size, data):
    confidences = [data.draw(st.sampled_from((0.5, 1.0))) for _ in parents]  # many ties
    reach = reach_probabilities(parents, confidences)
    kept = prune(ranked(replace(tree_of(parents), reach=reach)), size)
    assert kept.reach == tuple(sorted(reach, reverse=True)[:size])
    assert kept.size == min(size, len(parents))
    chosen = {token - 101 for token in kept.tokens}
    left = set(range(len(parents))) - chosen
    assert min((reach[i] for i in chosen), default=1) >= max((reach[i] for i in left), default=0)
    assert_is_part_of(kept, tree_of(parents))


@given(any_parents(), st.integers(1, 8))
def test_cutting_keeps_every_node_down_to_a_depth(parents, depth):
    tree = tree_of(parents)
    kept = cut_depth(tree, depth)
    deep = depths(parents)
    assert kept.tokens == tuple(t for t, d in zip(tree.tokens, deep, strict=True) if d <= depth)
    assert_is_part_of(kept, tree)


@given(any_parents(), st.data())
def test_the_accepted_path_is_the_longest_that_agrees(parents, data):
    """Two siblings have the same token: the first one is followed."""
    size = len(parents)
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=size + 1, max_size=size + 1))

    def agrees(node: int) -> bool:
        parent, token = parents[node - 1], tokens[node - 1]
        earlier = zip(parents[: node - 1], tokens[: node - 1], strict=True)
        return token == drawn[parent] and (parent, token) not in earlier

    paths = [sorted(ancestors(parents, node)) for node in range(size + 1)]
    found = accept(replace(tree_of(parents), tokens=tuple(tokens)), drawn)
    assert list(found.path) == max((p for p in paths if all(map(agrees, p))), key=len)
    assert found.tokens == tuple(drawn[node] for node in (0, *found.path))
    assert accept(TREE, TREE_DRAWN) == TREE_ACCEPTED


def assert_is_part_of(kept: DraftTree, tree: DraftTree) -> None:
    """Numbered anew, every node behind and below the parent it had, with its margin."""
    assert all(parent <= node for node, parent in enumerate(kept.parents))
    assert len(set(kept.tokens)) == kept.size
    assert parent_tokens(kept).items() <= parent_tokens(tree).items()
    assert kept.margins == tuple(tree.margins[token - 101] for token in kept.tokens)
