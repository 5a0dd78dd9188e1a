"""The depth of drafts, chosen in vLLM's scheduler from what its own steps took and yielded.

vLLM has a table of depths by the number of running requests. The scheduler knows what each step
took and yielded, in a server as in a loop, so the tuner runs there. Each choice is kept for some
steps, since a step verifies what the step before it drafted. Where each rank has a scheduler, all
take the choice of the first: their clocks differ.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import OffTuner, Tuner
from longtail.vllm.gains import Gains
from longtail.vllm.guards import chains, check

MAX_DEPTH = 8
"""Most tokens that vLLM drafts ahead; its cache and graphs are made for them."""
_HELD_STEPS = 6
"""Steps in which a depth is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDrafter:
    """A drafter that vLLM runs."""

    method: str
    """vLLM's name: eagle, eagle3 or ngram."""
    tuner: Tuner
    """Chooses the depth; it knows vLLM's steps alone, so one without a cost model."""
    directory: Path | None = None
    """Files in the layout of `longtail drafter export`; None for ngram."""
    tensors: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Returns published weights by vLLM's names."""

    def config(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        found = chains(self.method, MAX_DEPTH)
        return found if self.directory is None else found | {"model": str(self.directory)}


@final
class Depths:
    """Chooses the depth before each step of a scheduler, and learns from it afterwards.

    Without a tuner each step drafts as many tokens as vLLM's configuration says.
    """

    def __init__(
        self, scheduler: Any, tuner: Tuner | None, agree: Callable[[Plan], Plan] | None = None
    ) -> None:
        self._schedule = check(scheduler, "schedule", "", then="throttle_prefills")
        known = "scheduler_output model_runner_output"
        self._update = check(scheduler, "update_from_output", known)
        self._reset, self._pause = scheduler.reset_prefix_cache, scheduler.set_pause_state
        self._has_paused = False
        self._scheduler, self._agree, self._tuner = scheduler, agree, tuner or OffTuner()
        self._gains = Gains()
        self._plan = Plan(strategy=None)
        self._running = self._left = 0
        self.depth = 0 if tuner else scheduler.num_spec_tokens
        """Tokens to draft ahead; 0: plain decoding."""
        ahead = bool(scheduler.vllm_config.scheduler_config.async_scheduling)
        self._latest = deque([self.depth], maxlen=2 + ahead)
        """Depths at which the step that ends next verified and drafted, and later ones."""
        self._began: dict[int, float] = {}
        self._ended = 0.0
        self.plan_s = 0.0
        """Seconds of the last choice."""
        self._tuner.begin(None, 1)
        self._table = [] if tuner is None else [0] * (scheduler.max_num_running_reqs + 1)
        if self._table:
            scheduler.dynamic_sd_lookup = self._table
        scheduler.schedule, scheduler.update_from_output = self.schedule, self.update_from_output
        scheduler.reset_prefix_cache, scheduler.longtail_depths = self.reset_prefix_cache, self
        scheduler.set_pause_state = self.set_pause_state

    def use(self, tuner: Tuner) -> None:
        """Choose by another tuner, where the depth can be chosen."""
        if self._table:
            self._tuner = tuner
            tuner.begin(None, 1)

    def begin(self) -> None:
        """Draft with a drafter that has changed."""
        self._left = 0
        self._tuner.reset_estimates()

    def schedule(self, *args: Any, **options: Any) -> Any:
        """Schedule a step; the table says how many tokens it drafts (vLLM calls it)."""
        began, scheduler = time.perf_counter(), self._scheduler
        if self._table:
            self._choose(min(len(scheduler.running), scheduler.max_num_running_reqs))
            self._table[:] = [self.depth] * len(self._table)
        self.plan_s = time.perf_counter() - began
        output = self._schedule(*args, **options)
        if self._table:
            output.num_spec_tokens_to_schedule = self.depth  # vLLM 0.23 has no such field
        output.longtail_has_paused, self._has_paused = self._has_paused, False
        self._began[id(output)] = began
        return output

    def set_pause_state(self, *args: Any, **options: Any) -> Any:
        """Pause or resume, between which weights may change under requests (vLLM calls it)."""
        self._has_paused = True
        return self._pause(*args, **options)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Learn from a step that verified and drafted at one depth (vLLM calls it)."""
        now = time.perf_counter()
        # A step that was scheduled ahead begins when the one before has ended.
        began = max(self._began.pop(id(scheduler_output), now), self._ended)
        self._ended = now
        if scheduler_output.num_scheduled_tokens:
            self._learn(scheduler_output, model_runner_output, now - began)
        found = self._update(scheduler_output, model_runner_output)
        for each in found.values():
            if each.scheduler_stats is not None:
                each.scheduler_stats.longtail = dict(self._gains.gauges)
        return found

    def reset_prefix_cache(self, *args: Any, **options: Any) -> Any:
        """Log what drafts gained with these weights (vLLM calls it when they have changed)."""
        self._gains.log()
        return self._reset(*args, **options)

    def _choose(self, running: int) -> None:
        """Choose the depth of the next step."""
        self._left -= 1
        if running.bit_length() != self._running or self._left <= 0:
            self._running, self._left = running.bit_length(), _HELD_STEPS
            own = self._tuner.plan(self._batch(running, running))
            self._plan = own if self._agree is None else self._agree(own)
            strategy, most = self._plan.strategy, self._scheduler.num_spec_tokens
            self.depth = 0 if strategy is None else min(strategy.depth, most)
        self._latest.append(self.depth)

    def _learn(self, taken: Any, given: Any, seconds: float) -> None:
        """Learn from what a step took and yielded, and count it."""
        places, sampled = given.req_id_to_index, given.sampled_token_ids
        verified = [
            (len(drafts), max(len(sampled[places[name]]) - 1, 0))
            for name, drafts in taken.scheduled_spec_decode_tokens.items()
            if drafts and name in places
        ]
        num_nodes = sum(drafted for drafted, _ in verified)
        num_tokens = taken.total_num_scheduled_tokens - num_nodes
        outcome = Outcome(
            batch=self._batch(running := len(taken.num_scheduled_tokens), num_tokens),
            plan=self._plan,
            timings=(),
            num_drafts=len(verified),
            num_nodes=num_nodes,
            num_accepted=sum(accepted for _, accepted in verified),
            verify_s=seconds,
        )
        if len(set(self._latest)) == 1:
            self._tuner.learn(outcome)
        saved_s, plain_s = None, self._tuner.plain_s(running)
        if plain_s is not None and num_tokens == running:  # it reads no prompts
            saved_s = any(self._latest) * (outcome.num_emitted / running * plain_s - seconds)
        self._gains.add(verified, sum(map(len, sampled)), seconds, saved_s)

    def _batch(self, running: int, num_tokens: int) -> Batch:
        return Batch(
            num_draftable=running,
            num_sampled=running,
            num_tokens=num_tokens,
            num_pairs=0,
            room=running * self._scheduler.num_spec_tokens,
        )


def agreement(parallel: Any) -> Callable[[Plan], Plan] | None:
    """Return what gives each rank of torchrun the first one's choice; None with one scheduler."""
    if parallel.distributed_executor_backend != "external_launcher":
        return None
    from vllm.distributed import get_tp_group

    return lambda plan: get_tp_group().broadcast_object(plan)
