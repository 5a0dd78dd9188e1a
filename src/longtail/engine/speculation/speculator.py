"""Speculative decoding as the engine uses it, and a null object for engines without drafters.

    draft            plan a step and propose its drafts              (`planner`)
    apply_feedback   learn from the previous step                    (`planner`)
    record           keep feedback and observations of this step     (`planner`, `queue`)

Drafters observe computed tokens before the next `propose`. Switching between drafting and plain
decoding changes no KV and recomputes nothing.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, final

from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.runner import Sampler, StepClock, StepTimer
from longtail.engine.speculation.features import FeatureStore
from longtail.engine.speculation.planner import DraftPlanner, PlannedStep
from longtail.engine.speculation.queue import Computed, ObservationQueue
from longtail.generator import Switch, Verified
from longtail.model.transformer import ModelConfig
from longtail.speculation.drafter import NO_TAPS, Drafter, Statistics
from longtail.speculation.grow import GrowingDrafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, MAX_NODES, Accepted
from longtail.tuner.cost import CostModel
from longtail.tuner.guard import Guard
from longtail.tuner.tuner import FixedTuner, Tuner


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding."""

    drafters: tuple[Drafter, ...]
    tuner: Tuner
    coupled: bool = True
    """Whether drafters use the target's sampling noise; off only for comparisons."""
    guarded: bool = True
    """Whether drafting that loses against plain decoding is paused; off only for comparisons."""
    clock: StepClock = field(default_factory=StepClock)
    features: FeatureStore | None = None
    """Store of the target's features for drafter training."""
    texts: Statistics | None = None
    """Reads every token that is computed, whether or not anything is drafted."""

    @property
    def ready(self) -> tuple[Drafter, ...]:
        """Drafters that can draft: all but a fresh one before its first weights."""
        return tuple(each for each in self.drafters if each.is_ready)

    @property
    def learner(self) -> GrowingDrafter | None:
        """The drafter that learns: the first one with weights."""
        return next((each for each in self.drafters if isinstance(each, GrowingDrafter)), None)

    def load_weights(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the weights of the drafter that learns; see `GrowingDrafter.load_weights`."""
        assert self.learner is not None, "no drafter has weights"
        self.learner.load_weights(tensors)

    @staticmethod
    def fixed(
        drafter: Drafter, strategy: Strategy, *, coupled: bool = True, max_running: int = 0
    ) -> "Speculation":
        """Draft by one strategy in all steps of at most `max_running` requests (0: any number)."""
        tuner = FixedTuner(strategy, max_running=max_running)
        return Speculation(drafters=(drafter,), tuner=tuner, coupled=coupled, guarded=False)

    @property
    def needs_costs(self) -> bool:
        """Whether guard or tuner use the cost model."""
        return self.guarded or self.tuner.needs_costs


class SpeculationRecord(TypedDict, total=False):
    """Speculation's part of a step report."""

    verified: tuple[Verified, ...]
    switch: Switch | None
    speculates: bool


_STEPS_READ = 8
"""Steps that a state observer reads at once, since each call has its cost."""


@final
class NoSpeculation:
    """Plain decoding, with the interface of `Speculator`."""

    speculation = None
    drafters: tuple[Drafter, ...] = ()
    taps = NO_TAPS

    def __init__(self) -> None:
        self.timer = StepTimer(())
        self.queue = ObservationQueue()

    def draft(self, scheduled: Sequence[Scheduled], *_: object) -> Sequence[Scheduled]:
        """Return what was scheduled."""
        return scheduled

    def record(self, *_: object) -> SpeculationRecord:
        """Return an empty record."""
        return {}

    def apply_feedback(self) -> None:
        """Do nothing: no drafter learns, and none remembers a request."""

    def forget(self, active: ActiveRequest) -> None:
        """Do nothing."""

    def detach(self, *_: object) -> None:
        """Do nothing."""

    refresh = reset_estimates = on_idle = apply_feedback


@final
class Speculator:
    """Speculation in progress: `draft`, `apply_feedback` and `record` in each step, in this order.

    The other methods are called between two steps.
    """

    def __init__(
        self,
        speculation: Speculation,
        config: ModelConfig,
        costs: CostModel | None,
        before: "Speculator | NoSpeculation",
    ) -> None:
        self.speculation, self.drafters = speculation, speculation.ready
        self.taps = NO_TAPS
        readers = (*self.drafters, speculation.features, speculation.texts)
        for reader in (each for each in readers if each is not None):
            self.taps = self.taps.union(reader.taps)
        known = before.speculation
        if speculation.features and (known is None or known.features is not speculation.features):
            speculation.features.clear()  # the weights may have changed meanwhile
        lookbacks = [drafter.lookback for drafter in self.drafters]
        self.queue = ObservationQueue(max(lookbacks, default=1) if all(lookbacks) else 0)
        """Tokens that the drafters have not observed yet."""
        self._written = ObservationQueue(max_bytes=sys.maxsize)
        """Tokens that `speculation.texts` has not read yet."""
        if before.taps == self.taps:
            self.queue.inherit(before.queue)
        self._finished: list[str] = []
        """Finished requests that drafters without taps still remember."""
        assert costs is not None or not speculation.needs_costs, "costs are measured first"
        costs = costs if speculation.needs_costs else None
        guard = Guard(costs) if speculation.guarded and costs is not None else None
        windows = [window for window in config.windows if window]
        # A window counts positions, and the nodes of a draft share positions but not slots.
        deepest = min(windows) - 1 if windows else MAX_NODES
        self._clock = speculation.clock
        self._planner = DraftPlanner(
            self.drafters, speculation.tuner, guard, costs, self._clock, deepest
        )
        self.timer = self._planner.timer
        self._step: PlannedStep | None = None
        """None while a plain step is repeated."""

    def draft(
        self,
        scheduled: Sequence[Scheduled],
        sampler: Sampler,
        spare_tokens: int,
        try_grow: Callable[[str, int], bool],
    ) -> Sequence[Scheduled]:
        """Return what was scheduled, with drafts of at most `spare_tokens` nodes in all."""
        self._clock.begin()
        if self._planner.take_repeat(len(scheduled)):
            self._step = None
            return scheduled
        step = self._step = self._planner.plan(scheduled, spare_tokens)
        if not step.requests or step.plan.strategy is None:
            return scheduled
        missed = len(self.queue) > 1
        began_s = self._clock.read()
        self._send_observations()
        if missed:  # the cost of a pause, and not of the drafts
            began_s, first_s = self._clock.read(), began_s
            step = replace(step, catch_up_s=began_s - first_s)
        heard = sampler.for_drafts(step.requests) if self.speculation.coupled else None
        self._step = self._planner.propose(step, heard, began_s)
        drafts = self._planner.select(self._step, try_grow)
        return [
            Scheduled(
                active=each.active,
                num_tokens=each.num_tokens,
                draft=drafts.get(each.active, EMPTY),
            )
            for each in scheduled
        ]

    def apply_feedback(self) -> None:
        """Learn from the previous step; the present one waits for it."""
        self._planner.apply(hidden=False)

    def record(
        self,
        scheduled: Sequence[Scheduled],
        accepted: Mapping[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
    ) -> SpeculationRecord:
        """Keep the step's observations and feedback; return its part of the step's report.

        `features` are of all flat tokens of the step; the requests hold the new tokens already.
        """
        ends = [each.active.num_computed for each in scheduled]
        self.queue.add(Computed(scheduled, ends, accepted, features))
        store = self.speculation.features
        if store is not None:
            picked = self.taps.pick(store.taps, features)
            store.add(Computed(scheduled, ends, accepted, picked))
        if self.speculation.texts is not None:
            picked = self.taps.pick(self.speculation.texts.taps, features)
            self._written.add(Computed(scheduled, ends, accepted, picked))
            if len(self._written) == _STEPS_READ:
                self._read_written()
        return {
            "verified": self._planner.record(self._step, scheduled, accepted),
            "switch": self._planner.take_switch(),
            "speculates": True,
        }

    def _read_written(self) -> None:
        for batch in self._written.take(with_done=True):
            assert self.speculation.texts is not None, "see `record`"
            assert batch.features is not None, "they are tapped"
            self.speculation.texts.observe(batch.seen, batch.features)

    def forget(self, active: ActiveRequest) -> None:
        """Forget a finished request; drafters without taps observe its last tokens first."""
        for drafter in self.drafters:
            if drafter.taps.any:
                drafter.forget(active.request_id)
            else:
                self._finished.append(active.request_id)

    def refresh(self) -> None:
        """Follow changed weights of the target; no request is in progress."""
        for drafter in self.drafters:
            drafter.refresh()
        if self.speculation.features is not None:
            self.speculation.features.clear()

    def reset_estimates(self) -> None:
        """Estimate the gain of drafting anew, since a drafter was changed."""
        self._planner.reset_estimates()

    def on_idle(self) -> None:
        """Apply and forget everything pending; no request is in progress."""
        self._planner.apply()
        if self._planner.is_drafting:
            self._send_observations()
        self.queue.clear()
        self._read_written()
        self._forget_finished()

    def detach(self, successors: Sequence[Drafter], unfinished: Iterable[str]) -> None:
        """Remove all requests from the drafters that are not among the successors."""
        self._planner.apply()
        self._read_written()
        self._forget_finished()
        for drafter in self.drafters:
            if not any(drafter is each for each in successors):
                for request_id in unfinished:
                    drafter.forget(request_id)

    def _send_observations(self) -> None:
        """Pass all waiting tokens to the drafters."""
        text_only = not all(drafter.taps.any for drafter in self.drafters)
        for batch in self.queue.take(with_done=text_only):
            for drafter in self.drafters if batch.seen else ():
                drafter.observe(batch.seen, self.taps.pick(drafter.taps, batch.features))
                for request_id in batch.done:
                    drafter.forget(request_id)
        self._forget_finished()

    def _forget_finished(self) -> None:
        for drafter in self.drafters:
            if not drafter.taps.any:
                for request_id in self._finished:
                    drafter.forget(request_id)
        self._finished.clear()
