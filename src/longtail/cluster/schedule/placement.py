"""Placement: which worker generates which requests, and in which order.

A rollout ends with its longest completion, so completions that may become long begin first, spread
over the workers. Completions of one prompt are about equally long. Prompts come again in every
epoch, and hard ones stay long: `Lengths` has those of earlier epochs.

    groups of 4, expected tokens per request  A: 900   B: 30   C: 200   D: 50

    worker 0   A0 A2 C0 C2 D0 D2 B0 B2      longest first, to the worker with the fewest tokens
    worker 1   A1 A3 C1 C3 D1 D3 B1 B3
"""

from collections.abc import Sequence
from statistics import median
from typing import final

from longtail.types import Request


@final
class Lengths:
    """Length in tokens of the longest completion of each prompt since the start of this process."""

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


def _prompt_id(request: Request) -> str:
    """Return the id of a request's prompt: that of its group, without the epoch."""
    return request.group_id.rpartition("@")[0] or request.group_id


def shards(requests: Sequence[Request], lengths: Lengths, num_workers: int) -> list[list[Request]]:
    """Return the requests of each worker that has any, in the order in which they should begin.

    Requests are placed by descending expected length, each on the worker with the fewest expected
    tokens (ties: in the given order). Every worker gets as many requests, to within one. A request
    of unknown length counts like the median of the others.

    If they come out even the largest load is at most 2 - 1 / W times the optimum.
    tests/unit/cluster/test_placement.py has the proof.
    """
    found = [lengths.expected(each) for each in requests]
    known = [each for each in found if each is not None]
    usual = median(known) if known else 1.0
    expected = [usual if each is None else each for each in found]
    each, more = divmod(len(requests), num_workers)
    room = [each + (worker < more) for worker in range(num_workers)]
    loads = [0.0] * num_workers
    placed: list[list[Request]] = [[] for _ in range(num_workers)]
    for index in sorted(range(len(requests)), key=lambda index: -expected[index]):
        worker = min((one for one in range(num_workers) if room[one]), key=loads.__getitem__)
        placed[worker].append(requests[index])
        room[worker] -= 1
        loads[worker] += expected[index]
    return [each for each in placed if each]
