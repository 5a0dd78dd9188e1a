"""BEG-MAB, the bucketed epsilon-greedy bandit of TLT (arXiv 2511.16665, section 4.3).

Strategies are grouped in buckets by the number of running requests: the more requests run, the
smaller the drafts. Within a bucket the reward of an arm is the median over a sliding window of

    accept length x requests / seconds

and an arm that was never tried has infinite reward. The bandit needs neither confidences nor a cost
model. Unlike the paper's, each bucket has several arms, and plain decoding is one of them.
"""

import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import PLAIN, Tuner, fit_strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Strategies for steps with at most `max_requests` requests; plain decoding is added.

    Example: Bucket(max_requests=4, strategies=(Strategy(depth=8), Strategy(depth=4)))
    """

    max_requests: int
    strategies: tuple[Strategy, ...]


def _chains(max_requests: int, *depths: int) -> Bucket:
    strategies = tuple(Strategy(depth=depth, size=depth) for depth in depths)
    return Bucket(max_requests=max_requests, strategies=strategies)


BUCKETS = (_chains(1, 12, 8, 6, 4), _chains(4, 8, 6, 4, 3), _chains(20, 6, 4, 3, 2),
           _chains(1 << 30, 4, 3, 2, 1))  # fmt: skip
"""The paper's thresholds, with chains, which are best on a CPU."""


@final
class _Window:
    """Recent rewards of one arm, with their median."""

    def __init__(self, size: int) -> None:
        self._recent: deque[float] = deque(maxlen=size)
        self._sorted: list[float] = []

    def add(self, reward: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            del self._sorted[bisect_left(self._sorted, self._recent[0])]
        self._recent.append(reward)
        insort(self._sorted, reward)

    def median(self) -> float:
        if not self._sorted:
            return float("inf")
        return self._sorted[len(self._sorted) // 2]


@final
class BanditTuner(Tuner):
    """Plays arms; equal seeds and outcomes lead to equal choices."""

    def __init__(
        self,
        *,
        buckets: Sequence[Bucket] = BUCKETS,
        epsilon: float = 0.1,
        window: int = 300,
        seed: int = 0,
    ) -> None:
        assert 0 <= epsilon <= 1, f"epsilon {epsilon}"
        self._buckets, self._epsilon, self._size, self._seed = buckets, epsilon, window, seed
        self.begin(None, 1)

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Forget all rewards."""
        self._num_drafters = num_drafters
        self._random = random.Random(self._seed)
        self._windows = [
            [_Window(self._size) for _ in (None, *bucket.strategies)] for bucket in self._buckets
        ]

    def plan(self, batch: Batch) -> Plan:
        """Play a random arm with probability epsilon, else the arm with the highest median."""
        index = self._bucket_of(batch)
        windows = self._windows[index]
        if self._random.random() < self._epsilon:
            arm = self._random.randrange(len(windows))
        else:
            arm = max(range(len(windows)), key=lambda i: windows[i].median())
        return self._plan(index, arm, batch)

    def learn(self, outcome: Outcome) -> None:
        """Add the reward of a step that reads no prompts, whether or not this tuner planned it.

        Arms that come down to the strategy of the outcome all get the reward: with little room
        several arms are cut to the same chain.
        """
        batch, played = outcome.batch, outcome.plan.strategy
        if batch.num_tokens > batch.num_sampled:
            return
        index = self._bucket_of(batch)
        for arm, window in enumerate(self._windows[index]):
            is_plain = arm == 0
            if is_plain == (played is None) and self._plan(index, arm, batch).strategy == played:
                window.add(outcome.num_emitted / outcome.seconds)

    def _bucket_of(self, batch: Batch) -> int:
        """Return the index of the step's bucket; the last one has no limit."""
        limits = (bucket.max_requests for bucket in self._buckets[:-1])
        return next(
            (i for i, limit in enumerate(limits) if batch.num_sampled <= limit),
            len(self._buckets) - 1,
        )

    def _plan(self, index: int, arm: int, batch: Batch) -> Plan:
        """Return the plan of an arm, cut to the step's room; arm 0 is plain decoding."""
        if arm == 0:
            return PLAIN
        return fit_strategy(self._buckets[index].strategies[arm - 1], batch, self._num_drafters)
