"""Placement: each request once, even shares, long ones first, loads that meet their bound."""

import json
import random

from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.placement import Lengths, PromptGroup, part_sizes, place
from support.engine_requests import request_of

expectations = st.one_of(st.none(), st.integers(1, 4000).map(float))
group_lists = st.lists(
    st.builds(PromptGroup, size=st.integers(1, 8), expected=expectations), max_size=24
)


def group_of(groups: list[PromptGroup]) -> list[int]:
    """The group of each request."""
    return [index for index, group in enumerate(groups) for _ in range(group.size)]


@given(st.integers(1, 64), st.integers(0, 4000), expectations, st.integers(1, 200))
def test_parts_of_a_group_are_even_and_no_more_than_workers(size, prompt_len, expected, workers):
    sizes = part_sizes(size, prompt_len, expected, workers)
    assert sum(sizes) == size
    assert 1 <= len(sizes) <= min(size, workers)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if expected and len(sizes) > 1:  # each computes the prompt anew, for four times as many tokens
        assert prompt_len <= 0.25 * expected * min(sizes)


@given(group_lists, st.integers(1, 7))
def test_each_request_is_placed_once_in_even_shares_that_split_few_groups(groups, workers):
    placed, owner = place(groups, workers), group_of(groups)
    assert sorted(request for each in placed for request in each) == list(range(len(owner)))
    sizes = [len(each) for each in placed]
    assert max(sizes) - min(sizes) <= 1
    parts = [len({owner[request] for request in each}) for each in placed]
    assert sum(parts) - len(groups) <= workers - 1


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 7), st.integers(0, 999))
def test_no_worker_has_more_than_another_would_with_the_longest_group(size, rounds, workers, seed):
    """So the largest load is at most 2 - 1 / W times the optimum.

    Consider workers with loads A and B, of a and b groups, when x is placed: A - B + (b - a) x
    never exceeds M, the load of the longest group. If b <= a, because A - B does not: x went where
    less was. If b > a, because a placement leaves it as it is and a smaller x lowers it. In the end
    b = a. Summed over all B, W A <= all tokens + (W - 1) M.
    """
    chance = random.Random(seed)
    lengths = [float(int(chance.paretovariate(0.7))) for _ in range(rounds * workers)]
    groups = [PromptGroup(size=size, expected=tokens) for tokens in lengths]
    owner, longest = group_of(groups), size * max(lengths)
    loads = [sum(lengths[owner[request]] for request in each) for each in place(groups, workers)]
    assert max(loads) <= min(loads) + longest
    optimum = max(sum(loads) / workers, longest)
    assert max(loads) <= (2 - 1 / workers) * optimum * (1 + 1e-12)


def test_an_unknown_length_counts_like_the_median_of_the_known():
    groups = [PromptGroup(size=1, expected=tokens) for tokens in (10.0, None, 30.0, 50.0)]
    assert place(groups, 1) == [[3, 1, 2, 0]]  # 30 for the unknown one, which was asked earlier


def test_the_longest_completion_of_a_prompt_is_known_in_the_next_epoch():
    lengths, other = Lengths(), request_of("r@1#1", (1,), group="r@1")
    for n, each in enumerate((10, 400, 200)):
        lengths.record(request_of(f"q@1#{n}", (1,), group="q@1"), each)
    again = Lengths()
    again.restore(json.loads(json.dumps(lengths.state())))
    for each in (lengths, again):
        assert (each.expected(request_of("q@2#0", (1,), group="q@2")), each.expected(other)) == (
            400.0,
            None,
        )
