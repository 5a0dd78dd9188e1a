"""Placement: each request once, even shares, long ones first, loads that meet their bound."""

import random

from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.placement import Lengths, shards
from longtail.types import Request
from support.engine_requests import request_of

expectations = st.one_of(st.none(), st.integers(1, 4000))
group_lists = st.lists(st.tuples(st.integers(1, 8), expectations), max_size=24)


def asked(groups: list[tuple[int, int | None]]) -> tuple[list[Request], Lengths]:
    """Return the requests of groups by size and expected length, and the known lengths."""
    requests, lengths = [], Lengths()
    for number, (size, expected) in enumerate(groups):
        own = [request_of(f"{number}@1#{n}", (1,), group=f"{number}@1") for n in range(size)]
        requests += own
        if expected is not None:
            lengths.record(own[0], expected)
    return requests, lengths


@given(group_lists, st.integers(1, 7))
def test_each_request_is_placed_once_in_even_shares_and_long_ones_begin_first(groups, workers):
    requests, lengths = asked(groups)
    placed = shards(requests, lengths, workers)
    assert sorted(each.request_id for own in placed for each in own) == sorted(
        each.request_id for each in requests
    )
    assert len(placed) == min(workers, len(requests))
    sizes = [len(own) for own in placed]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    for own in placed:
        known = [found for each in own if (found := lengths.expected(each)) is not None]
        assert known == sorted(known, reverse=True)


@given(st.integers(1, 12), st.integers(1, 7), st.integers(0, 999))
def test_no_worker_has_more_than_another_would_with_the_longest_request(rounds, workers, seed):
    """So the largest load is at most 2 - 1 / W times the optimum.

    Consider workers with loads A and B, of a and b requests, when x is placed: A - B + (b - a) x
    never exceeds M, the longest. If b <= a, because A - B does not: x went where less was. If
    b > a, because a placement leaves it as it is and a smaller x lowers it. In the end b = a.
    Summed over all B, W A <= all tokens + (W - 1) M.
    """
    chance = random.Random(seed)
    tokens = [int(chance.paretovariate(0.7)) for _ in range(rounds * workers)]
    requests, lengths = asked([(1, each) for each in tokens])
    placed = shards(requests, lengths, workers)
    loads = [sum(lengths.expected(each) for each in own) for own in placed]
    assert max(loads) <= min(loads) + max(tokens)
    optimum = max(sum(tokens) / workers, max(tokens))
    assert max(loads) <= (2 - 1 / workers) * optimum * (1 + 1e-12)


def test_an_unknown_length_counts_like_the_median_of_the_known():
    requests, lengths = asked([(1, 10), (1, None), (1, 30), (1, 50)])
    (order,) = shards(requests, lengths, 1)  # 30 for the unknown one, which was asked earlier
    assert [each.group_id for each in order] == ["3@1", "1@1", "2@1", "0@1"]


def test_the_longest_completion_of_a_prompt_is_known_in_the_next_epoch():
    lengths, other = Lengths(), request_of("r@1#1", (1,), group="r@1")
    for n, each in enumerate((10, 400, 200)):
        lengths.record(request_of(f"q@1#{n}", (1,), group="q@1"), each)
    assert lengths.expected(request_of("q@2#0", (1,), group="q@2")) == 400.0
    assert lengths.expected(other) is None
