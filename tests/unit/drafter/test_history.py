"""The history drafter on worked examples: counts, drafts and eviction."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.drafter.history import HistoryDrafter, PhraseDrafter, SuffixDrafter
from longtail.speculation.drafter import Draftable, Noise, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, Accepted, DraftTree, depths
from support.engine_requests import draftable, observed

PROMPT, OTHER = (1, 2), (1, 3)
A, B, C, D, E, X, Y = range(10, 17)
CHAIN, TREE = Strategy(depth=4), Strategy(depth=4, width=2, size=8)


@final
class TableNoise(Noise):
    """Given noise, with a record of the depths that were read."""

    def __init__(self, *levels: Sequence[dict[int, float]]) -> None:
        """Set the values of levels[d - 1][row] at depth d; all others are 0."""
        super().__init__([0] * len(levels[0]), [0] * len(levels[0]), 0)
        self._levels = levels
        self.read: list[int] = []

    def of(self, request: int, depth: int) -> Callable[[int], float]:
        self.read.append(depth)
        return lambda token: self._levels[depth - 1][request].get(token, 0.0)


def seen(
    name: str,
    completion: Sequence[int],
    prompt: Sequence[int] = PROMPT,
    start: int = 0,
    end: int = 0,
) -> Observed:
    tokens = [*prompt, *completion]
    return observed(name, tokens, start, end or len(tokens), len(prompt))


def ask(
    completion: Sequence[int],
    prompt: Sequence[int] = PROMPT,
    name: str = "asking",
    max_depth: int = 9,
) -> Draftable:
    return draftable(name, [*prompt, *completion], len(prompt), max_depth=max_depth)


def drafter_that_saw(*completions: Sequence[int], prompt: Sequence[int] = PROMPT) -> HistoryDrafter:
    drafter = HistoryDrafter()
    for number, completion in enumerate(completions):
        drafter.observe([seen(f"seen{number}", completion, prompt)], None)
    return drafter


def draft(
    drafter: SuffixDrafter,
    *requests: Draftable,
    strategy: Strategy = CHAIN,
    noise: Noise | None = None,
) -> DraftTree:
    """Return the tree of the last request."""
    return drafter.propose(requests, strategy, noise)[-1]


@pytest.fixture
def figure() -> HistoryDrafter:
    """The texts are those of the module's docstring."""
    return drafter_that_saw((A, B, C, D), (A, B, C, D), (X, B, C, E))


@pytest.mark.parametrize(
    ("text", "lead"),
    [((Y, A, B, C), 2 * 3**2), ((Y, B, C), 2 / 1)],
    ids=["one continuation, seen twice after three tokens", "the more frequent of two"],
)
def test_only_the_longest_known_context_is_used(figure, text, lead):
    tree = draft(figure, ask(text))
    assert (tree.tokens, tree.parents) == ((D,), (0,))  # d has no continuation
    assert tree.margins == pytest.approx((math.log(lead),))


@pytest.mark.parametrize(("for_d", "for_e", "first"), [(0.5, 0.1, D), (-1.0, 2.0, E)])
def test_among_equally_frequent_tokens_the_one_with_the_highest_noise_is_drafted(
    for_d, for_e, first
):
    drafter = drafter_that_saw((B, C, D), (X, B, C, E))
    noise = TableNoise([{D: for_d, E: for_e}])
    tree = draft(drafter, ask((Y, B, C)), strategy=Strategy(depth=1), noise=noise)
    lead = min(abs(for_d - for_e), math.log(2 * 2**2 / 2))
    assert tree.tokens == (first,)
    assert tree.margins == pytest.approx((lead,))


def test_each_request_reads_its_own_row_and_each_node_its_own_depth():
    drafter = drafter_that_saw((B, C, D), (X, B, C, E), (D, A), (X, D, X), (E, A), (E, X))
    noise = TableNoise([{D: 9.0}, {E: 9.0}], [{X: 9.0}, {A: 9.0}])
    requests = [ask((Y, B, C), name="first"), ask((Y, B, C), name="second")]
    trees = drafter.propose(requests, Strategy(depth=2), noise)
    assert [tree.tokens for tree in trees] == [(D, X), (E, A)]


def test_a_request_repeats_itself_and_its_prompt():
    drafter = drafter_that_saw((A, B, C, X, A))
    assert draft(drafter, ask((A, B, C, X, A, B), name="seen0")).tokens == (C, X, A, B)
    assert draft(HistoryDrafter(), ask((X, 1), prompt=(1, 2, 3))).tokens == (2, 3)


def test_the_last_token_of_a_text_is_the_root_and_not_yet_known():
    drafter = HistoryDrafter()
    drafter.observe([seen("a", (A, B, C), end=4)], None)  # c is sampled, not computed
    assert draft(drafter, ask((Y, A))).tokens == (B,)


@pytest.mark.parametrize("strategy", [CHAIN, TREE])
def test_the_texts_of_another_prompt_are_not_used(strategy):
    drafter = drafter_that_saw((A, B, C, D), prompt=OTHER)
    assert draft(drafter, ask((A,)), strategy=strategy) == EMPTY


def counted(drafter: HistoryDrafter, before: int, token: int) -> int:
    """Return the count of `token` after `before`, from the margin log(count * 1**2)."""
    tree = draft(drafter, ask((Y, before), name="probe"), strategy=Strategy(depth=1))
    assert tree.tokens == (token,)
    return round(math.exp(tree.margins[0]))


def test_recomputed_text_is_counted_once():
    drafter = HistoryDrafter()
    drafter.observe([seen("a", (A, B), end=3)], None)
    drafter.observe([seen("a", (A, B), start=3)], None)
    for end in (2, 3, 4):  # preempted: from the start again, in pieces
        drafter.observe([seen("a", (A, B), end=end)], None)
    drafter.observe([seen("a", (A, B, C), start=1)], None)  # and on, in one piece
    assert (counted(drafter, A, B), counted(drafter, B, C)) == (1, 1)
    assert drafter.num_tokens == len(PROMPT) + 3


def test_a_prompt_is_counted_once_for_all_its_requests():
    """The first request computes it in pieces, the second shares its KV, the third does not."""
    drafter = HistoryDrafter()
    drafter.observe([seen("a", (), end=1)], None)
    drafter.observe([seen("a", (A,), start=1), seen("b", (A,), start=2), seen("c", ())], None)
    assert drafter.num_tokens == len(PROMPT) + 2
    assert counted(drafter, PROMPT[-1], A) == 2


def test_above_max_tokens_the_least_recently_used_prompts_are_dropped():
    drafter = HistoryDrafter(max_tokens=12)
    for number in range(3):  # four tokens each
        drafter.observe([seen(f"r{number}", (A, B), prompt=(1, 100 + number))], None)
        drafter.forget(f"r{number}")
    assert drafter.num_tokens == 12
    drafter.observe([seen("again", (), prompt=(1, 100))], None)  # the first is in use again
    drafter.observe([seen("new", (A, B), prompt=(1, 103))], None)
    assert drafter.num_tokens == 12
    asked = [ask((A,), prompt=(1, 100 + number), name=f"asking{number}") for number in range(4)]
    kept = [tree != EMPTY for tree in drafter.propose(asked, CHAIN, None)]
    assert kept == [True, False, True, True]


def test_prompts_with_a_request_in_progress_are_never_dropped():
    drafter = HistoryDrafter(max_tokens=5)
    drafter.observe([seen("a", (A, B), PROMPT), seen("b", (A, B), OTHER)], None)
    assert drafter.num_tokens == 8
    drafter.forget("a")
    assert drafter.num_tokens == 4
    assert draft(drafter, ask((A,), OTHER, name="b")).tokens == (B,)
    drafter.forget("never known")


def test_a_path_that_is_almost_never_accepted_is_not_drafted(figure):
    tree = draft(figure, ask((Y, A, B, C)))
    for _ in range(500):
        figure.learn([tree], [Accepted(path=(), tokens=(X,))])
    # The acceptance is 2 / 500 and the prior weighs 8 observations: far below 0.02.
    assert draft(figure, ask((Y, A, B, C))) == EMPTY
    assert draft(figure, ask((Y, A, B, C)), strategy=TREE) == EMPTY


TEXTS = st.lists(st.lists(st.integers(10, 13), min_size=1, max_size=12), min_size=1, max_size=4)
SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(0, 9), st.integers(1, 5))


@given(TEXTS, SHAPES, st.booleans())
def test_drafts_respect_the_strategys_shape(texts, shape, coupled):
    depth, width, size, max_depth = shape
    strategy = Strategy(depth=depth, width=width, size=size)
    noise = TableNoise(*[[{10: 1.0, 11: 0.5 * level}] for level in range(5)]) if coupled else None
    drafter = drafter_that_saw(*texts)
    tree = draft(drafter, ask(texts[0][:3], max_depth=max_depth), strategy=strategy, noise=noise)
    deep = depths(tree.parents)
    assert tree.size == len(tree.parents) == len(tree.margins) <= strategy.num_nodes
    assert tree.size == len(tree.reach)
    assert all(parent <= node for node, parent in enumerate(tree.parents))
    assert max(deep, default=0) <= min(depth, max_depth)
    places = Counter(zip(tree.parents, tree.tokens, strict=True))
    assert max(places.values(), default=1) == 1
    assert max(Counter(tree.parents).values(), default=0) <= width
    followed = {parent for parent in tree.parents if parent}
    assert max(Counter(deep[node - 1] for node in followed).values(), default=0) <= width


def test_phrases_are_those_of_all_completions_and_of_no_prompt():
    drafter = PhraseDrafter()
    drafter.observe([seen("seen", (A, B, C, D), OTHER)], None)
    assert draft(drafter, ask((X, A, B))).tokens == (C, D)
    assert draft(drafter, ask((X, 1), prompt=(9, 9))) == EMPTY  # of OTHER, which begins with 1, 3


def test_the_newest_phrases_come_first_and_old_ones_are_forgotten():
    drafter = PhraseDrafter(max_tokens=8)
    texts = ((A, B, C, D, E), (A, B, X, Y), (E, Y, Y, Y, Y))
    found = []
    for number, text in enumerate(texts):
        drafter.observe([seen(f"seen{number}", text)], None)
        drafter.forget(f"seen{number}")
        assert drafter.num_tokens <= 10
        found.append(draft(drafter, ask((X, A, B))).tokens[:1])
    assert found == [(C,), (X,), (X,)]
    drafter.observe([seen("seen3", (E, E, E, E, E))], None)
    assert draft(drafter, ask((X, A, B))) == EMPTY
