"""The process of a benchmark: the CPUs it keeps to and its lines of progress; needs no torch."""

import os
import sys
from collections.abc import Callable, Sequence

Log = Callable[[str], None]


def pin(threads: int) -> list[int]:
    """Keep this process and its children on the last `threads` CPUs it may use; return them.

    The list is empty where the system cannot pin. To choose other CPUs, use `taskset`.
    """
    if sys.platform != "linux":
        return []
    cpus = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cpus)
    return cpus


def pinned(cpus: Sequence[int]) -> str:
    """Return the words of a card for `pin`'s result."""
    return f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"


def progress(bench: str) -> Log:
    """Return a function that prints lines of progress to stderr."""
    return lambda text: print(f"bench {bench}: {text}", file=sys.stderr, flush=True)
