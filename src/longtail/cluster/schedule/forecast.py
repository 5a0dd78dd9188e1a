"""Forecasts of a rollout from what is measured in it: speeds and lengths.

length of a completion   the longest of its prompt in earlier epochs
seconds per token        a + b n, where n requests run; fitted to the workers' progress
speed of a worker        by its seconds per token relative to these: a host may be slow, or share
                         its processors
"""

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, final

from longtail.cluster.records import Progress
from longtail.types import Request

_FADE = 0.98
"""Weight of an observation relative to the next one of the same worker."""
_LEAST_S = 0.1
"""Seconds of an observation; less is the jitter of messages."""
_LEAST_OWN_S, _NOISE = 2.0, 0.25
"""Seconds of a worker before it has a speed, and most by which equal workers are measured apart.

Measured: two workers of one machine that wrote 12 steps of 32 texts with SmolLM2, drafts included,
while two cores were shared with 15 to 35 other processes. In all polls after two seconds of each
worker the slower one was at 0.78 of the faster one or above, at the ends of rollouts at 0.86; in
the second before, at 0.66. By the time of their processors alone: 0.82, 0.89 and 0.74.
"""


@final
class TokenTimes:
    """Seconds in which each of n running requests grows by one token: a + b n, both at least 0.

    Fitted by least squares, weighted by the tokens of each request: the sum over what was observed
    is the seconds that it took.
    """

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        """Sums of w, w n, w n^2, w t and w n t."""

    def observe(self, num_running: float, num_tokens: int, seconds: float, writers: int) -> None:
        """Add `num_tokens` that one of `writers` has generated in some seconds."""
        fade = _FADE ** (1 / writers)
        each_s, n, w = seconds * num_running / num_tokens, num_running, num_tokens / num_running
        new = (w, w * n, w * n * n, w * each_s, w * n * each_s)
        self._sums = [fade * a + b for a, b in zip(self._sums, new, strict=True)]

    def seconds(self, num_running: float) -> float:
        """Return the seconds of one token of each of `num_running` requests."""
        w, wn, wnn, wt, wnt = self._sums
        if w <= 0.0:
            return 0.0
        mean_n, mean_t = wn / w, wt / w
        spread = wnn / w - mean_n**2
        slope = (wnt / w - mean_n * mean_t) / spread if spread > 0.25 else 0.0
        slope = min(max(slope, 0.0), mean_t / mean_n)
        return mean_t - slope * mean_n + slope * num_running


@final
class WorkerSpeeds:
    """Speed of each worker, from its seconds per token relative to those of all.

        worker      0      1      2      3
        measured    1.04   0.98   0.51   0.47   seconds by the common line, for each one it took
        counts as   1      1      0.485  0.485  speeds within the noise are one: their mean

    So workers that differ by noise alone count as equal, and 1 is the speed of the fastest ones.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        """Sums of each worker over what was observed: tokens of each text, these times the number
        of texts, seconds."""
        self._relative: dict[int, float] = {}

    def of(self, worker: int) -> float:
        """Return the speed of a worker: 1 for the fastest, and until a worker is observed."""
        return self._relative.get(worker, 1.0)

    def observe(self, worker: int, num_running: float, num_tokens: int, seconds: float) -> None:
        """Add `num_tokens` that a worker has generated."""
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
            if seconds >= _LEAST_OWN_S
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


@final
class Forecaster:
    """Measures the rollouts of a run: what a worker will take for a completion."""

    def __init__(self) -> None:
        self.times, self.lengths, self.speeds = TokenTimes(), Lengths(), WorkerSpeeds()
        self._seen: dict[int, tuple[float, Progress]] = {}
        """Time and progress of each worker when it was last observed."""

    def begin(self) -> None:
        """Begin a rollout."""
        self._seen.clear()

    def observe(self, progress: Mapping[int, Progress], now: float, *, is_alone: bool) -> None:
        """Learn from the progress of the generating workers if no worker does other work."""
        for worker, each in progress.items():
            at_s, before = self._seen.get(worker, (now, each))
            written = each.num_generated - before.num_generated
            running = (each.num_running + before.num_running) / 2
            if not is_alone or written < 0 or worker not in self._seen:
                self._seen[worker] = now, each
            elif now - at_s >= _LEAST_S and written and running:
                seconds = now - at_s
                if each.num_running <= before.num_running:
                    self.speeds.observe(worker, running, written, seconds)
                usual_s = seconds * self.speeds.of(worker)
                self.times.observe(running, written, usual_s, len(progress))
                self._seen[worker] = now, each
        self.speeds.compare(self.times.seconds)
