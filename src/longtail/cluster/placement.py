"""Placement: which worker generates which requests, and in which order.

A rollout ends with its longest completion, so completions that may become long begin first, spread
over the workers. Completions of one prompt are about equally long, so a group is divided into parts
(`part_sizes`) and these are placed (`place`). Prompts come again in every epoch, and hard ones stay
long: `LengthHistory` keeps the lengths of earlier epochs.

    groups of 4, expected tokens per request  A: 900   B: 30   C: 200   D: 50

    worker 0   A0 A1 C0 C1 D0 D1 B0 B1      longest first, to the worker with the fewest tokens;
    worker 1   A2 A3 C2 C3 D2 D3 B2 B3      every worker gets its even share of requests

Requests are indices into the list of all requests, group after group.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, final

_PROMPT_COST = 0.25
"""Most prompt tokens of a part for each token that it generates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """Requests with the same prompt that stay together, so that they share its KV.

    Example: PromptGroup(size=8, expected=412.0)
    """

    size: int
    expected: float | None = None
    """Expected tokens per request, from earlier epochs; None if unknown."""


@final
class LengthHistory:
    """Length of the longest completion of each prompt, by prompt id. Saved in checkpoints."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def record(self, prompt_id: str, length: int) -> None:
        """Record the length of a completion in tokens."""
        self._longest[prompt_id] = max(length, self._longest.get(prompt_id, 0))

    def expected(self, prompt_id: str) -> float | None:
        """Return the expected length in tokens; None for an unknown prompt."""
        longest = self._longest.get(prompt_id)
        return None if longest is None else float(longest)

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON."""
        return {"longest": dict(self._longest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._longest = {str(name): int(length) for name, length in state["longest"].items()}


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
    return _even_shares(size, most)


def place(groups: Sequence[PromptGroup], num_workers: int) -> list[list[int]]:
    """Return the requests of each worker, in the order in which they should begin.

    Groups are placed by descending expected length, each on the worker with the fewest expected
    tokens so far (ties: in the given order). Every worker gets its even share of requests, to
    within one. The requests of a group stay together; it is split only if no worker has room for
    all of it, which happens less often than there are workers. A group of unknown length counts
    like the median of the others.

    For groups of one size that come out even, the loads (expected tokens) of two workers differ by
    at most the longest group's, so the largest load is at most 2 - 1 / num_workers times the
    optimum. (Consider loads A and B, of a and b groups, when x is placed: A - B + (b - a) x never
    exceeds the longest group. If b <= a, because A - B does not: x goes to the smaller load. If
    b > a, because a placement leaves it as it is and a smaller x lowers it. When B has its share of
    k groups, A gets k - a more, none above x.)
    """
    known = [group.expected for group in groups if group.expected is not None]
    usual = median(known) if known else 1.0
    lengths = [usual if group.expected is None else group.expected for group in groups]
    edges = [0, *accumulate(group.size for group in groups)]
    room = _even_shares(edges[-1], num_workers)
    loads = [0.0] * num_workers
    placed: list[list[int]] = [[] for _ in range(num_workers)]
    for index in sorted(range(len(groups)), key=lambda index: -lengths[index]):
        begin, end = edges[index], edges[index + 1]
        while begin < end:
            whole = [worker for worker in range(num_workers) if room[worker] >= end - begin]
            some = [worker for worker in range(num_workers) if room[worker]]
            worker = min(whole or some, key=lambda worker: loads[worker])
            count = min(room[worker], end - begin)
            placed[worker] += range(begin, begin + count)
            room[worker] -= count
            loads[worker] += count * lengths[index]
            begin += count
    return placed


def _even_shares(count: int, num_shares: int) -> list[int]:
    """Divide `count` to within one, the larger shares first."""
    share, rest = divmod(count, num_shares)
    return [share + (index < rest) for index in range(num_shares)]
