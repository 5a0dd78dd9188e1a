"""Placement: which worker generates which requests, and in which order.

A rollout ends with its longest completion, so completions that may become long begin first, spread
over the workers. Completions of one prompt are about equally long, so a group is divided into parts
(`part_sizes`) and these are placed (`place`). Prompts come again in every epoch, and hard ones stay
long: `Lengths` has those of earlier epochs.

    groups of 4, expected tokens per request  A: 900   B: 30   C: 200   D: 50

    worker 0   A0 A1 C0 C1 D0 D1 B0 B1      longest first, to the worker that is done with it first
    worker 1   A2 A3 C2 C3 D2 D3 B2 B3

Requests are indices into the list of all requests, group after group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from statistics import median
from typing import Any, final

from longtail.types import Request

_PROMPT_COST = 0.25
"""Most prompt tokens of a part for each token that it generates."""


@final
class Lengths:
    """Length in tokens of the longest completion of each prompt so far, saved in checkpoints."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}
        """By prompt id."""

    def record(self, request: Request, length: int) -> None:
        """Record a finished completion."""
        prompt_id = _prompt_id(request)
        self._longest[prompt_id] = max(length, self._longest.get(prompt_id, 0))

    def expected(self, request: Request) -> float | None:
        """Return the length of the prompt's longest completion so far; None without any."""
        longest = self._longest.get(_prompt_id(request))
        return None if longest is None else float(longest)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON."""
        return {"longest": dict(self._longest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._longest = {str(name): int(length) for name, length in state["longest"].items()}


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Requests with the same prompt that stay together, so that they share its KV."""

    size: int
    expected: float | None = None
    """Expected tokens per request, from earlier epochs; None if unknown."""


def shards(requests: Sequence[Request], lengths: Lengths, num_workers: int) -> list[list[Request]]:
    """Place the requests, in parts of groups: one shard for each worker that has any."""
    parts = []
    for _, members in groupby(requests, key=lambda each: each.group_id or each.request_id):
        group = list(members)
        length = lengths.expected(group[0])
        sizes = part_sizes(len(group), len(group[0].prompt_tokens), length, num_workers)
        parts += [PromptGroup(size=size, expected=length) for size in sizes]
    return [[requests[i] for i in shard] for shard in place(parts, num_workers) if shard]


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
    return _shares(size, most)


def place(groups: Sequence[PromptGroup], num_workers: int) -> list[list[int]]:
    """Return the requests of each worker, in the order in which they should begin.

    Groups are placed by descending expected length, each on the worker with the fewest expected
    tokens (ties: in the given order). Every worker gets as many requests, to within one. The
    requests of a group stay together; it is split only if no worker has room for all of it, which
    happens less often than there are workers. A group of unknown length counts like the median of
    the others.

    For groups of one size that come out even the largest load is at most 2 - 1 / W times the
    optimum. tests/unit/cluster/test_placement.py has the proof.
    """
    known = [group.expected for group in groups if group.expected is not None]
    usual = median(known) if known else 1.0
    lengths = [usual if group.expected is None else group.expected for group in groups]
    edges = [0, *accumulate(group.size for group in groups)]
    room = _shares(edges[-1], num_workers)
    loads = [0.0] * num_workers
    placed: list[list[int]] = [[] for _ in range(num_workers)]
    for index in sorted(range(len(groups)), key=lambda index: -lengths[index]):
        begin, end = edges[index], edges[index + 1]
        while begin < end:
            whole = [worker for worker, free in enumerate(room) if free >= end - begin]
            some = [worker for worker, free in enumerate(room) if free]
            worker = min(whole or some, key=lambda worker: loads[worker])
            count = min(room[worker], end - begin)
            placed[worker] += range(begin, begin + count)
            room[worker] -= count
            loads[worker] += count * lengths[index]
            begin += count
    return placed


def _shares(count: int, num: int) -> list[int]:
    """Divide `count` evenly, to within one; the first ones get more."""
    return [count // num + (each < count % num) for each in range(num)]
