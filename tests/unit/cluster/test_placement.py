"""Placement: each request once, even shares, long ones first, loads that meet their bound."""

import random

from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.placement import PromptGroup, part_sizes, place

expectations = st.one_of(st.none(), st.integers(1, 4000).map(float))
group_lists = st.lists(
    st.builds(PromptGroup, size=st.integers(1, 8), expected=expectations), max_size=24
)
speed_lists = st.lists(st.sampled_from((1.0, 1.0, 0.5, 0.3)), min_size=1, max_size=7)


def group_of(groups: list[PromptGroup]) -> list[int]:
    """The group of each request."""
    return [index for index, group in enumerate(groups) for _ in range(group.size)]


def test_a_worker_that_was_slow_has_a_request_by_which_it_is_observed():
    placed = place([PromptGroup(size=1)] * 8, [0.01, *[1.0] * 7])
    assert [len(each) for each in placed] == [1] * 8


@given(st.integers(1, 64), st.integers(0, 4000), expectations, st.integers(1, 200))
def test_parts_of_a_group_are_even_and_no_more_than_workers(size, prompt_len, expected, workers):
    sizes = part_sizes(size, prompt_len, expected, workers)
    assert sum(sizes) == size
    assert 1 <= len(sizes) <= min(size, workers)
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    if expected and len(sizes) > 1:  # each computes the prompt anew, for four times as many tokens
        assert prompt_len <= 0.25 * expected * min(sizes)


@given(group_lists, speed_lists)
def test_each_request_is_placed_once_in_shares_by_speed_that_split_few_groups(groups, speeds):
    placed, owner = place(groups, speeds), group_of(groups)
    assert sorted(request for each in placed for request in each) == list(range(len(owner)))
    for each, speed in zip(placed, speeds, strict=True):
        assert abs(len(each) - len(owner) * speed / sum(speeds)) < 1
    assert placed == place(groups, [4 * speed for speed in speeds])
    parts = [len({owner[request] for request in each}) for each in placed]
    assert sum(parts) - len(groups) <= len(speeds) - 1


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.lists(st.integers(1, 3), min_size=1, max_size=7),
    st.integers(0, 999),
)
def test_no_worker_ends_later_than_another_would_with_the_longest_group_more(
    size, rounds, numbers, seed
):
    """So the largest time is at most 1 + (W - 1) / S times the optimum.

    Consider workers with loads A and B, of a and b groups, and speeds p and q, when x is placed: A
    / p - B / q + (b / q - a / p) x never exceeds M / q, where M is the load of the longest group.
    If b / q <= a / p, because A / p - B / q does not: x went where it was done first. If b / q > a
    / p, because a placement leaves it as it is and a smaller x lowers it. In the end b / q = a / p.
    Summed over all B, S A / p <= all tokens + (W - 1) M.
    """
    chance = random.Random(seed)
    lengths = [float(int(chance.paretovariate(0.7))) for _ in range(rounds * sum(numbers))]
    groups = [PromptGroup(size=size, expected=tokens) for tokens in lengths]
    owner, speeds = group_of(groups), [number / max(numbers) for number in numbers]
    loads = [sum(lengths[owner[request]] for request in each) for each in place(groups, speeds)]
    longest = size * max(lengths)
    last = max(load / speed for load, speed in zip(loads, speeds, strict=True))
    with_longest = [(load + longest) / each for load, each in zip(loads, speeds, strict=True)]
    assert last <= min(with_longest) * (1 + 1e-12)
    optimum = max(sum(loads) / sum(speeds), longest)
    assert last <= (1 + (len(speeds) - 1) / sum(speeds)) * optimum * (1 + 1e-12)


def test_an_unknown_length_counts_like_the_median_of_the_known():
    groups = [PromptGroup(size=1, expected=tokens) for tokens in (10.0, None, 30.0, 50.0)]
    assert place(groups, [1.0]) == [[3, 1, 2, 0]]  # 30 for the unknown one, which was asked earlier
