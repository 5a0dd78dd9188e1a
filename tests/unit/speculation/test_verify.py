"""Verification: the running example, and that it follows the longest agreeing path."""

from hypothesis import given
from hypothesis import strategies as st

from longtail.speculation.tree import Accepted, DraftTree, accept

Places = list[tuple[int, int]]
"""Parent and token of each node."""


@st.composite
def any_places(draw: st.DrawFn) -> Places:
    """A draft of three tokens, so that draws often agree; siblings differ."""
    places: Places = []
    for _ in range(draw(st.integers(0, 16))):
        place = (draw(st.integers(0, len(places))), draw(st.integers(0, 2)))
        if place not in places:
            places.append(place)
    return places


def tree_of(places: Places) -> DraftTree:
    return DraftTree(
        tokens=tuple(token for _, token in places),
        parents=tuple(parent for parent, _ in places),
        margins=(0.0,) * len(places),
    )


def any_draws(places: Places) -> st.SearchStrategy[list[int]]:
    size = len(places) + 1
    return st.lists(st.integers(0, 2), min_size=size, max_size=size)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from below the root down to a node."""
    return [*path_to(tree, tree.parents[node - 1]), node] if node else []


def test_the_example_of_the_docstring_holds():
    tree = DraftTree(tokens=(5, 6, 7), parents=(0, 0, 1), margins=(0.0, 0.0, 0.0))
    assert accept(tree, (5, 7, 9, 8)) == Accepted(path=(1, 3), tokens=(5, 7, 8))


def test_of_siblings_with_one_token_the_first_is_followed():
    tree = DraftTree(tokens=(5, 5, 6), parents=(0, 0, 2), margins=(0.0, 0.0, 0.0))
    assert accept(tree, (5, 6, 6, 6)) == Accepted(path=(1,), tokens=(5, 6))


@given(any_places(), st.data())
def test_the_accepted_path_is_the_longest_that_agrees(places, data):
    tree, drawn = tree_of(places), data.draw(any_draws(places))
    agreeing = [
        path
        for path in (path_to(tree, node) for node in range(tree.size + 1))
        if all(tree.tokens[node - 1] == drawn[tree.parents[node - 1]] for node in path)
    ]
    found = accept(tree, drawn)
    assert list(found.path) == max(agreeing, key=len)
    assert found.tokens == tuple(drawn[node] for node in (0, *found.path))
