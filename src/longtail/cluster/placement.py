"""Which worker gets which requests, and in which order: long ones first, spread over the workers.

A rollout ends with its longest completion, so whatever may become long should begin at once, and
not all of it in one place. Prompts come again, epoch after epoch, and hard ones stay long: the
length book remembers them.

    groups of 2, expected tokens a request    A: 900   B: 30   C: 200   D: 50

    worker 0   A0 A1 B0 B1      longest first to whoever has the least to write; then both have
    worker 1   C0 C1 D0 D1      had two groups, their even share

Requests are indices into the list of all requests, group after group. Nothing here knows engines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, final


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """A group of requests that ask the same prompt.

    Example: PromptGroup(size=8, expected=412.0)
    """

    size: int
    expected: float | None = None
    """Tokens a request, by earlier visits; None where there were none."""


@final
class LengthHistory:
    """Remembers, by prompt id, the longest completion there was. Kept in checkpoints."""

    def __init__(self) -> None:
        self._longest: dict[str, int] = {}

    def record(self, prompt_id: str, length: int) -> None:
        """Take note of a completion's length in tokens."""
        self._longest[prompt_id] = max(length, self._longest.get(prompt_id, 0))

    def expected(self, prompt_id: str) -> float | None:
        """Return the tokens to expect; None of a prompt that was never noted."""
        longest = self._longest.get(prompt_id)
        return None if longest is None else float(longest)

    def state(self) -> dict[str, Any]:
        """Return what `restore` reads; JSON."""
        return {"longest": dict(self._longest)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a kept state."""
        self._longest = {str(name): int(length) for name, length in state["longest"].items()}


def place(groups: Sequence[PromptGroup], num_workers: int) -> list[list[int]]:
    """Return the requests of each worker, in the order in which they should begin.

    Groups are dealt by falling expected length, each to the worker with the fewest expected tokens
    so far (ties: in the order given). Every worker gets its even share of requests, to a request:
    whoever has it gets no more. PromptGroup share the KV of their prompt, so they stay together; a
    group is cut only where no worker has room left for the whole, which happens less often than
    there are workers. A group without an expectation counts like the median of the others, so
    without any knowledge groups are dealt in turn.

    Where groups are of one size and come out even, the loads (expected tokens) of two workers
    differ by the longest group's at most, so the largest load is at most 2 - 1 / num_workers times
    the least possible. (Of loads A and B, made of a and b groups, while x is dealt:
    A - B + (b - a) x never exceeds the longest group. Where b <= a, because A - B does not: deals
    go to the lesser. Where b > a, because a deal leaves it as it is and a smaller x lowers it. When
    B has its share of k groups, A gets k - a more, none above x.)
    """
    known = [group.expected for group in groups if group.expected is not None]
    usual = median(known) if known else 1.0
    lengths = [usual if group.expected is None else group.expected for group in groups]
    edges = [0, *accumulate(group.size for group in groups)]
    share, rest = divmod(edges[-1], num_workers)
    room = [share + (worker < rest) for worker in range(num_workers)]
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
