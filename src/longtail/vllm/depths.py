"""The depth of drafts, chosen in vLLM's scheduler from what its own steps took and yielded.

vLLM has a table of depths by the number of running requests. The scheduler knows what each step
took and yielded, in a server as in a loop, so the tuner runs there. Each choice is kept for some
steps, since a step verifies what the step before it drafted. Where each rank has a scheduler, all
take the choice of the first: their clocks differ.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, final

from longtail.tuner.messages import Batch, Outcome, Plan
from longtail.tuner.tuner import OffTuner, Tuner
from longtail.vllm.gain_log import Gains
from longtail.vllm.patching import around, check

_HELD_STEPS = 6
"""Steps in which a depth is kept."""


@final
class Depths:
    """Chooses the depth before each step of a scheduler, and learns from it afterwards.

    Without a tuner each step drafts as many tokens as vLLM's configuration says, if any.
    """

    def __init__(
        self, scheduler: Any, tuner: Tuner | None, agree: Callable[[Plan], Plan] | None = None
    ) -> None:
        check(scheduler, "schedule", "", then="throttle_prefills")
        check(scheduler, "update_from_output", "scheduler_output model_runner_output")
        mine = self.schedule, self.update_from_output, self.reset_prefix_cache, self.set_pause_state
        for new in mine:
            setattr(scheduler, new.__name__, around(getattr(scheduler, new.__name__), new))
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
        self.taken: Any = None
        """vLLM's schedule of the step that ended last."""
        self._tuner.begin(None, 1)
        self._table = [] if tuner is None else [0] * (scheduler.max_num_running_reqs + 1)
        if self._table:
            scheduler.dynamic_sd_lookup = self._table
        scheduler.longtail_depths = self

    def use(self, tuner: Tuner) -> None:
        """Choose by another tuner, where the depth can be chosen."""
        if self._table:
            self._tuner = tuner
            tuner.begin(None, 1)

    def begin(self) -> None:
        """Draft with a drafter that has changed."""
        self._left = 0
        self._tuner.reset_estimates()

    def schedule(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Schedule a step; the table says how many tokens it drafts (vLLM calls it)."""
        began, scheduler = time.perf_counter(), self._scheduler
        if self._table:
            self._choose(min(len(scheduler.running), scheduler.max_num_running_reqs))
            self._table[:] = [self.depth] * len(self._table)
        self.plan_s = time.perf_counter() - began
        output = stock(*args, **options)
        if self._table:
            output.num_spec_tokens_to_schedule = self.depth  # vLLM 0.23 has no such field
        output.longtail_has_paused, self._has_paused = self._has_paused, False
        self._began[id(output)] = began
        return output

    def set_pause_state(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Pause or resume, between which weights may change under requests (vLLM calls it)."""
        self._has_paused = True
        return stock(*args, **options)

    def update_from_output(
        self, stock: Callable[..., Any], scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        """Learn from a step that verified and drafted at one depth (vLLM calls it)."""
        now = time.perf_counter()
        # A step that was scheduled ahead begins when the one before has ended.
        began = max(self._began.pop(id(scheduler_output), now), self._ended)
        self._ended = now
        self.taken = scheduler_output
        if self._scheduler.num_spec_tokens and scheduler_output.num_scheduled_tokens:
            self._learn(scheduler_output, model_runner_output, now - began)
        found = stock(scheduler_output, model_runner_output)
        for each in found.values():
            if each.scheduler_stats is not None and self._scheduler.num_spec_tokens:
                each.scheduler_stats.longtail = dict(self._gains.gauges)
        return found

    def reset_prefix_cache(self, stock: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Log what drafts gained with these weights (vLLM calls it when they have changed)."""
        self._gains.log()
        return stock(*args, **options)

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
