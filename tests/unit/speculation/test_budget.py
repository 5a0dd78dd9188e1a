"""The draft budget against brute force, what it cuts, and how drafts of several are joined."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.budget import best_count, merge, optimal_budget, select_nodes
from longtail.speculation.tree import (
    EMPTY,
    MAX_NODES,
    DraftTree,
    accept,
    depths,
    follow,
    prune,
    ranked,
)
from support.worked import TREE, TREE_ACCEPTED, TREE_DRAWN, TREE_REACH, chain, reach_probabilities

LIKELY = ranked(replace(TREE, reach=TREE_REACH))


@st.composite
def any_sketch(draw: st.DrawFn) -> tuple[list[int], list[int], list[float]]:
    """Parents, tokens and confidences; the record is made outside, its checks use `random`."""
    size = draw(st.integers(0, 12))
    return (
        [draw(st.integers(0, node)) for node in range(size)],
        draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)),
        draw(st.lists(st.sampled_from((0.25, 0.5, 0.9, 1.0)), min_size=size, max_size=size)),
    )


def tree_of(sketch: tuple[list[int], list[int], list[float]], *, speaks: bool = True) -> DraftTree:
    parents, tokens, sure = sketch
    tree = DraftTree(tokens=tuple(tokens), parents=tuple(parents), margins=(0.0,) * len(tokens))
    return ranked(replace(tree, reach=reach_probabilities(parents, sure))) if speaks else tree


def paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """The tokens down to each node, with its reach, the greatest where several are alike."""
    found: list[tuple[int, ...]] = [()]
    sure: dict[tuple[int, ...], float] = {}
    reach = tree.reach or (1.0,) * tree.size
    for token, parent, likely in zip(tree.tokens, tree.parents, reach, strict=True):
        found.append((*found[parent], token))
        sure[found[-1]] = max(likely, sure.get(found[-1], 0.0))
    return sure


@given(
    st.lists(st.floats(0.0, 1.0), max_size=7),
    st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    st.integers(1, 5),
)
def test_no_choice_of_nodes_is_quicker_than_the_one_found(reach, steps, num):
    table = 0.1 + np.cumsum(steps)  # any cost that rises with the number of nodes
    likeliest = sorted(reach, reverse=True)
    best, tokens_per_s = optimal_budget(np.array(likeliest), 1.0, num, lambda n: table[n])
    rates = [
        (num + sum(p for i, p in enumerate(reach) if chosen >> i & 1)) / table[chosen.bit_count()]
        for chosen in range(2 ** len(reach))
    ]
    assert tokens_per_s == pytest.approx(max(rates))
    assert tokens_per_s == pytest.approx((num + sum(likeliest[:best])) / table[best])


def test_scarce_room_goes_to_the_likeliest_of_all_requests():
    sure, doubtful = chain((1, 2), (0.9, 0.85)), chain((3, 4), (0.8, 0.3))
    assert select_nodes([doubtful, sure], 3) == [prune(doubtful, 1), sure]
    assert select_nodes([doubtful, sure], 2) == [EMPTY, sure]


def test_drafts_without_probabilities_are_cut_only_by_room():
    silent = chain((1, 2, 3))
    assert select_nodes([silent, LIKELY], 3) == [silent, EMPTY]
    assert select_nodes([silent, silent], 4) == [silent, prune(silent, 1)]


@given(
    reach=st.lists(st.floats(0, 1), max_size=12),
    costs=st.lists(st.floats(0, 1), min_size=13, max_size=13),
    rate=st.floats(0, 10),
)
def test_no_number_of_nodes_yields_more(reach: list[float], costs: list[float], rate: float):
    ranked_reach, table = np.array(sorted(reach, reverse=True)), np.cumsum(costs)
    best = best_count(ranked_reach, rate, lambda nodes: table[nodes])
    surplus = [ranked_reach[:n].sum() - rate * table[n] for n in range(len(reach) + 1)]
    assert surplus[best] == pytest.approx(max(surplus), abs=1e-9)


@given(st.lists(st.tuples(any_sketch(), st.booleans()), min_size=1, max_size=5), st.integers(0, 40))
def test_selection_respects_room(sketches, room):
    trees = [tree_of(sketch, speaks=speaks) for sketch, speaks in sketches]
    selected = select_nodes(trees, room)
    assert sum(tree.size for tree in selected) <= room
    for tree, whole in zip(selected, trees, strict=True):
        assert tree == prune(whole, tree.size)
    if sum(tree.size for tree in trees) <= room:
        assert selected == trees


def test_of_too_many_nodes_the_likeliest_stay():
    first = chain(range(40), [0.9 - 0.01 * i for i in range(40)])
    second = chain(range(100, 140), [0.895 - 0.01 * i for i in range(40)])
    joined = merge([first, second])
    assert joined.size == MAX_NODES
    assert joined.reach == tuple(sorted(first.reach + second.reach, reverse=True)[:MAX_NODES])


@given(st.lists(st.tuples(any_sketch(), st.booleans()), min_size=2, max_size=4))
def test_a_joined_draft_is_a_tree_in_falling_order_with_every_path(sketches):
    trees = [tree_of(sketch, speaks=speaks) for sketch, speaks in sketches]
    joined = merge(trees)
    assert all(parent <= node for node, parent in enumerate(joined.parents))
    assert all(a >= b for a, b in pairwise(joined.reach))
    wanted: dict[tuple[int, ...], float] = {}
    for tree in trees:
        for path, sure in paths(tree).items():
            wanted[path] = max(sure, wanted.get(path, 0.0))
    assert len(wanted) <= MAX_NODES  # of four times twelve
    assert paths(joined) == wanted
    if sum(tree.size > 0 for tree in trees) > 1:
        assert joined.size == len(wanted)


@given(any_sketch(), st.data())
def test_following_the_verified_tree_gives_the_accepted_path(sketch, data):
    tree = tree_of(sketch)
    size = tree.size + 1
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    assert follow(tree, accept(tree, drawn).tokens) == accept(tree, drawn)
    assert follow(TREE, accept(TREE, TREE_DRAWN).tokens) == TREE_ACCEPTED


@given(any_sketch(), st.integers(0, 12), st.lists(st.integers(0, 3), min_size=13, max_size=13))
def test_following_a_larger_tree_gives_its_possible_path(sketch, size, text):
    whole = tree_of(sketch)
    kept = prune(whole, size)

    def verified(tree: DraftTree) -> int:
        """Nodes that a target would accept that writes this text whatever it reads."""
        return len(accept(tree, [text[depth] for depth in (0, *depths(tree.parents))]).path)

    assert len(follow(whole, text).path) == verified(whole)
    assert len(follow(kept, text).path) == verified(kept) <= verified(whole)
