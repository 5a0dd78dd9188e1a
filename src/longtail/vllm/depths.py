"""The depth of drafts in vLLM, chosen between its steps from what they took and yielded.

vLLM has a table of depths by the number of running requests. Each choice of the tuner is kept for
some steps, since a step verifies what the step before it drafted.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.generator import Switch
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner

MAX_DEPTH = 8
"""Most tokens that vLLM drafts ahead; its cache and graphs are made for them."""
_HELD_STEPS = 6
"""Steps in which a depth is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDrafter:
    """A drafter that vLLM runs.

    Example: VllmDrafter(method="ngram", tuner=BanditTuner())
    """

    method: str
    """vLLM's name: eagle, eagle3 or ngram."""
    tuner: Tuner
    """Chooses the depth; it knows vLLM's steps alone, so one without a cost model."""
    directory: Path | None = None
    """Files in the layout of `longtail drafter export`; None for ngram."""
    tensors: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Returns published weights by vLLM's names."""

    def config(self, max_running: int) -> dict[str, Any]:
        """Return vLLM's `speculative_config`, with a table for every number of requests."""
        found: dict[str, Any] = {
            "method": self.method,
            "num_speculative_tokens": MAX_DEPTH,
            "num_speculative_tokens_per_batch_size": [(1, max_running, MAX_DEPTH)],
        }
        if self.directory is not None:
            return found | {"model": str(self.directory)}
        return found | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A step of vLLM.

    Example: Taken(num_running=2, num_tokens=8, verified=[(3, 1), (3, 0)], seconds=0.02)
    """

    num_running: int
    num_tokens: int
    """Tokens that were computed, drafts among them."""
    verified: Sequence[tuple[int, int]]
    """Drafted and accepted tokens of each request with drafts."""
    seconds: float


@final
class Depths:
    """The depth of drafts in vLLM's table, from its own steps."""

    def __init__(self, tuner: Tuner, most: int = MAX_DEPTH, *, ahead: bool = False) -> None:
        """`ahead`: a step is scheduled before the one before has ended."""
        self._tuner, self._most = tuner, most
        self._plan = Plan(strategy=None)
        self._running = self._left = 0
        self._latest = deque([0], maxlen=2 + ahead)
        """Depths at which the step that ends next verified and drafted, and later ones."""
        self.depth = 0
        """Tokens to draft ahead; 0: plain decoding."""
        self._tuner.begin(None, 1)

    def begin(self) -> None:
        """Draft with a drafter that has changed."""
        self._left = 0
        self._tuner.reset_estimates()

    def choose(self, running: int) -> Switch | None:
        """Choose the depth of the next step; return the change between drafting and not."""
        before = self.depth
        self._left -= 1
        if running.bit_length() != self._running or self._left <= 0:
            self._running, self._left = running.bit_length(), _HELD_STEPS
            self._plan = self._tuner.plan(self._batch(running, running))
            strategy = self._plan.strategy
            self.depth = 0 if strategy is None else min(strategy.depth, self._most)
        self._latest.append(self.depth)
        if bool(self.depth) == bool(before):
            return None
        reason = self._plan.reason or f"{running} running, measured in vLLM's steps"
        return Switch(drafts=bool(self.depth), reason=reason)

    def learn(self, step: Taken) -> None:
        """Learn from a step that verified and drafted at one depth."""
        if len(set(self._latest)) > 1 or not step.num_running:
            return
        num_nodes = sum(drafted for drafted, _ in step.verified)
        outcome = Outcome(
            batch=self._batch(step.num_running, step.num_tokens - num_nodes),
            plan=self._plan,
            timings=(),
            num_drafts=len(step.verified),
            num_nodes=num_nodes,
            num_accepted=sum(accepted for _, accepted in step.verified),
            verify_s=step.seconds,
        )
        self._tuner.learn(outcome)

    def _batch(self, running: int, num_tokens: int) -> Batch:
        return Batch(
            num_draftable=running,
            num_sampled=running,
            num_tokens=num_tokens,
            num_pairs=0,
            room=running * self._most,
        )
