"""Placement: which worker generates which requests, and in which order.

A rollout ends with its longest completion, so completions that may become long begin first, spread
over the workers. Completions of one prompt are about equally long, so a group is divided into parts
(`part_sizes`) and these are placed (`place`). Prompts come again in every epoch, and hard ones stay
long: `forecast.Lengths` keeps the lengths of earlier epochs.

    groups of 4, expected tokens per request  A: 900   B: 30   C: 200   D: 50

    worker 0   A0 A1 C0 C1 D0 D1 B0 B1      longest first, to the worker that is done with it first;
    worker 1   A2 A3 C2 C3 D2 D3 B2 B3      a worker of half the speed gets half as many requests

Requests are indices into the list of all requests, group after group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median

from longtail.cluster.schedule.forecast import Lengths
from longtail.types import Request

_PROMPT_COST = 0.25
"""Most prompt tokens of a part for each token that it generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Requests with the same prompt that stay together, so that they share its KV."""

    size: int
    expected: float | None = None
    """Expected tokens per request, from earlier epochs; None if unknown."""


def shards(
    requests: Sequence[Request], lengths: Lengths, speeds: Sequence[float]
) -> list[list[Request]]:
    """Place the requests, in parts of groups: one shard for each worker that has any.

    The shard of the fastest worker comes first.
    """
    parts = []
    for _, members in groupby(requests, key=lambda each: each.group_id or each.request_id):
        group = list(members)
        length = lengths.expected(group[0])
        sizes = part_sizes(len(group), len(group[0].prompt_tokens), length, len(speeds))
        parts += [PromptGroup(size=size, expected=length) for size in sizes]
    placed = sorted(zip(speeds, place(parts, speeds), strict=True), key=lambda each: -each[0])
    return [[requests[index] for index in shard] for _, shard in placed if shard]


def part_sizes(size: int, prompt_len: int, expected: float | None, num_workers: int) -> list[int]:
    """Return the sizes of the parts into which a group of `size` requests is divided.

    There is one part for each worker, but no more than keep the prompt, which every part computes
    for itself, within a quarter of the tokens that the part is expected to generate. With
    `expected` unknown only the number of workers counts.

    Example: part_sizes(8, 100, 600.0, 16) == [1] * 8, part_sizes(8, 100, 150.0, 16) == [4, 4]
    """
    most = min(size, num_workers)
    if expected is not None:
        least = max(1, math.ceil(prompt_len / (_PROMPT_COST * max(expected, 1.0))))
        most = max(1, min(most, size // least))
    return _shares(size, [1.0] * most)


def place(groups: Sequence[PromptGroup], speeds: Sequence[float]) -> list[list[int]]:
    """Return the requests of each worker, in the order in which they should begin.

    `speeds` are those of the workers, in any unit. Groups are placed by descending expected length,
    each on the worker that would have written its tokens first (ties: in the given order). Every
    worker gets its share of requests by its speed, to within one. The requests of a group stay
    together; it is split only if no worker has room for all of it, which happens less often than
    there are workers. A group of unknown length counts like the median of the others.

    The time of a worker is its load (expected tokens) over its speed. For groups of one size that
    come out even (every share is a number of groups), the largest time is at most 1 + (W - 1) / S
    times the optimum, where S is the sum of the W speeds with the fastest as 1; for equal speeds
    2 - 1 / W. tests/unit/cluster/test_placement.py has the proof.
    """
    known = [group.expected for group in groups if group.expected is not None]
    usual = median(known) if known else 1.0
    lengths = [usual if group.expected is None else group.expected for group in groups]
    edges = [0, *accumulate(group.size for group in groups)]
    room = _shares(edges[-1], speeds)
    loads = [0.0] * len(speeds)
    placed: list[list[int]] = [[] for _ in speeds]
    for index in sorted(range(len(groups)), key=lambda index: -lengths[index]):
        begin, end = edges[index], edges[index + 1]
        while begin < end:
            whole = [worker for worker, free in enumerate(room) if free >= end - begin]
            some = [worker for worker, free in enumerate(room) if free]
            more = (end - begin) * lengths[index]
            worker = min(whole or some, key=lambda worker: (loads[worker] + more) / speeds[worker])
            count = min(room[worker], end - begin)
            placed[worker] += range(begin, begin + count)
            room[worker] -= count
            loads[worker] += count * lengths[index]
            begin += count
    return placed


def _shares(count: int, speeds: Sequence[float]) -> list[int]:
    """Divide `count` by speed, to within one: more for those with none, then by remainder."""
    total = sum(speeds)
    exact = [count * speed / total for speed in speeds]
    shares = [math.floor(each) for each in exact]
    ranked = sorted(range(len(speeds)), key=lambda i: (shares[i] > 0, shares[i] - exact[i]))
    for worker in ranked[: count - sum(shares)]:
        shares[worker] += 1
    return shares
