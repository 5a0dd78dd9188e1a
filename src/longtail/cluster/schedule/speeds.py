"""Speeds of workers, relative to the fastest: a host may be slow, or share its processors.

    worker      0      1      2      3
    measured    1.04   0.98   0.51   0.47      seconds by the common line, for each second it took
    counts as   1      1      0.485  0.485     speeds within the noise are one: their mean

So workers that differ by noise alone count as equal, and 1 is the speed of the fastest ones.
"""

from collections.abc import Callable
from statistics import fmean
from typing import final

_FADE = 0.98
"""Weight of an observation relative to the next one of the same worker."""
_LEAST_S, _NOISE = 2.0, 0.25
"""Seconds of a worker before it has a speed, and most by which equal workers are measured apart.

Measured: two workers of one machine that wrote 12 steps of 32 texts with SmolLM2, drafts included,
while two cores were shared with 15 to 35 other processes. In all polls after two seconds of each
worker the slower one was at 0.78 of the faster one or above, at the ends of rollouts at 0.86; in
the second before, at 0.66. By the time of their processors alone: 0.82, 0.89 and 0.74.
"""


@final
class WorkerSpeeds:
    """Speed of each worker, from its seconds per token beside those that are common to all."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        """Sums of each worker over what was observed: tokens of each text, these times the number
        of texts, seconds."""
        self._relative: dict[int, float] = {}

    def of(self, worker: int) -> float:
        """Return the speed of a worker: 1 for the fastest, and until a worker is observed."""
        return self._relative.get(worker, 1.0)

    def observe(self, worker: int, num_running: float, num_tokens: int, seconds: float) -> None:
        """Add `num_tokens` that a worker has written; no worker did other work meanwhile."""
        old = self._sums.get(worker, (0.0, 0.0, 0.0))
        new = (num_tokens / num_running, num_tokens, seconds)
        each, tokens, all_s = (_FADE * a + b for a, b in zip(old, new, strict=True))
        self._sums[worker] = each, tokens, all_s

    def forget(self, worker: int) -> None:
        """Forget what was observed of a worker that is replaced."""
        self._sums.pop(worker, None)
        self._relative.pop(worker, None)

    def compare(self, token_s: Callable[[float], float]) -> None:
        """Compare the workers; `token_s` are the seconds of a token of each of n running texts."""
        measured = {
            worker: each * token_s(tokens / each) / seconds
            for worker, (each, tokens, seconds) in self._sums.items()
            if seconds >= _LEAST_S
        }
        alike: list[dict[int, float]] = []
        for worker in sorted(measured, key=lambda worker: -measured[worker]):
            if not alike or measured[worker] < (1.0 - _NOISE) * fmean(alike[-1].values()):
                alike.append({})
            alike[-1][worker] = measured[worker]
        means = [fmean(workers.values()) for workers in alike]
        self._relative = {
            worker: mean / means[0]
            for workers, mean in zip(alike, means, strict=True)
            for worker in workers
        }
