"""Speculative decoding as the engine uses it: a plan and drafts before a step, feedback after it.

    draft     Batch --guard, tuner--> Plan --drafters--> proposals --tuner--> drafts to verify
    record    apply the feedback of the step before, and keep that of this step

        draft, run n | apply n - 1, record n | draft, run n + 1 | apply n, record n + 1

A draft uses only spare resources: tokens that the step has left and KV that no request owns. It
never preempts a request. All cuts of drafts after `Drafter.propose` are made here.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.runner import Sampler
from longtail.engine.speculation.feature_store import FeatureStore
from longtail.engine.speculation.token_feed import Observations
from longtail.generator import Switch, Verified
from longtail.model.transformer import ModelConfig
from longtail.speculation.drafter import Drafter, Statistics
from longtail.speculation.grow import GrowingDrafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, MAX_NODES, Accepted, DraftTree, cut_depth, follow
from longtail.system.stopwatch import Clock, Stopwatch
from longtail.tuner.cost import CostModel
from longtail.tuner.guard import Guard
from longtail.tuner.messages import Batch, DraftTiming, Outcome, Plan
from longtail.tuner.tuner import PLAIN, FixedTuner, Tuner


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Settings of speculative decoding."""

    drafters: tuple[Drafter, ...]
    tuner: Tuner
    coupled: bool = True
    """Whether drafters use the target's sampling noise; off only for comparisons."""
    guarded: bool = True
    """Whether drafting that loses by the measured costs is paused; off only for comparisons."""
    clock: Clock = time.perf_counter
    """Clock of what guard, tuner and cost model learn from."""
    features: FeatureStore | None = None
    """Store of the target's features for drafter training."""
    statistics: Statistics | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationReport:
    """Speculation's part of a step's report, with the names that it has there."""

    verified: tuple[Verified, ...] = ()
    switch: Switch | None = None
    draft_s: float = 0.0
    draft_forward_s: float = 0.0
    tuner_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Step:
    """A step: its plan, the drafts proposed for it, then its draws and its outcome."""

    began_s: float
    batch: Batch
    plan: Plan
    requests: Sequence[ActiveRequest] = ()
    """Requests for which drafts are proposed, in order."""
    proposals: list[list[DraftTree]] = field(default_factory=list)
    """Trees by drafter of the plan, then by request."""
    timings: list[DraftTiming] = field(default_factory=list)
    catch_up_s: float = 0.0
    """Seconds in which drafters observed the tokens of several steps, after a pause of drafting."""
    accepted: Mapping[str, Accepted] = field(default_factory=dict)
    outcome: Outcome | None = None


@final
class Speculator:
    """Speculation in progress: `draft` before each step, and `record` after it.

    The other methods are called between two steps.
    """

    def __init__(
        self,
        speculation: Speculation,
        config: ModelConfig,
        costs: CostModel | None,
    ) -> None:
        self.speculation, self.drafters = speculation, speculation.ready
        self.observations: Observations = Observations(
            self.drafters, speculation.statistics, speculation.features
        )
        self._costs = costs
        self._guard = None if costs is None else Guard(costs)
        self._tuner, self._clock = speculation.tuner, speculation.clock
        windows = [window for window in config.windows if window]
        # A window counts positions, and the nodes of a draft share positions but not slots.
        self._max_depth = min(windows) - 1 if windows else MAX_NODES
        self._watch, self._forward_before = Stopwatch(), 0.0
        self._step: _Step | None = None
        """The step in progress."""
        self._previous: _Step | None = None
        """The step before, until its feedback is applied."""
        self._is_drafting = True
        """Whether the last plan drafts; probes do not count."""
        self._switch: Switch | None = None
        """A change of it that is not yet reported."""

    def draft(
        self,
        scheduled: Sequence[Scheduled],
        sampler: Sampler,
        spare_tokens: int,
        try_grow: Callable[[str, int], bool],
    ) -> Sequence[Scheduled]:
        """Return what was scheduled, with drafts of at most `spare_tokens` nodes in all."""
        self._watch.lap()
        self._forward_before = self._forward_s
        with self._watch.section("draft"):
            step = self._step = self._plan(scheduled, spare_tokens)
            if not step.requests:
                return scheduled
            self._propose(step, sampler)
            drafts = self._select(step, try_grow)
            return [replace(each, draft=drafts.get(each.active, EMPTY)) for each in scheduled]

    def record(
        self,
        scheduled: Sequence[Scheduled],
        accepted: Mapping[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
        *,
        is_last: bool,
    ) -> SpeculationReport:
        """Apply the previous step's feedback, keep that of this step, and report it.

        `features` are of all flat tokens of the step; the requests hold the new tokens already.
        `is_last`: no request is left, so that nothing stays pending.
        """
        assert self._step is not None, "`draft` comes before"
        with self._watch.section("draft"):
            learned_s = self._apply_feedback()
            self.observations.add(scheduled, accepted, features)
            drafted = [each for each in scheduled if each.draft.size] if self._step.requests else []
            verified = tuple(_verified(each, accepted[each.active.request_id]) for each in drafted)
            step, self._step = self._step, None
            apart_s = sum(each.seconds for each in step.timings) + step.catch_up_s + learned_s
            step.accepted, self._previous = accepted, step
            step.outcome = Outcome(
                batch=step.batch,
                plan=step.plan,
                timings=tuple(step.timings),
                catch_up_s=step.catch_up_s,
                num_drafts=len(drafted),
                num_nodes=sum(each.num_drafted for each in verified),
                num_accepted=sum(each.num_accepted for each in verified),
                num_expected=sum((sum(each.draft.reach) for each in drafted), 0.0),
                verify_s=self._clock() - step.began_s - apart_s,
            )
            switch, self._switch = self._switch, None
            if is_last:
                self.end()
        seconds = self._watch.lap()
        tuner_s = seconds.get("tuner", 0.0)
        return SpeculationReport(
            verified=verified,
            switch=switch,
            draft_s=seconds["draft"] - tuner_s if self.drafters else 0.0,
            draft_forward_s=self._forward_s - self._forward_before,
            tuner_s=tuner_s,
        )

    def end(self) -> None:
        """Leave nothing pending, since no request is in progress."""
        self._apply_feedback()
        self.observations.end(is_drafting=self._is_drafting)

    def reset_estimates(self) -> None:
        """Estimate the gain of drafting anew, since a drafter was changed."""
        self._apply_feedback()
        self._tuner.reset_estimates()

    def detach(self, successors: Sequence[Drafter], unfinished: Iterable[str]) -> None:
        """Remove all requests from the drafters that are not among the successors."""
        self._apply_feedback()
        self.observations.detach(successors, unfinished)

    @property
    def _forward_s(self) -> float:
        """Seconds of all forward passes of the drafters so far."""
        return sum((each.forward_s for each in self.drafters), 0.0)

    def _plan(self, scheduled: Sequence[Scheduled], spare_tokens: int) -> _Step:
        """Decide whether to draft in a step, and for which requests."""
        began_s = self._clock()
        with self._watch.section("tuner"):
            batch, plan = _batch(scheduled, spare_tokens), PLAIN
            may_draft = self.drafters and batch.num_draftable and spare_tokens > 0
            if may_draft and (self._guard is None or self._guard.allows(batch)):
                plan = self._tuner.plan(batch)
                drafts = plan.strategy is not None
                if plan is not PLAIN and not plan.is_probe and drafts != self._is_drafting:
                    self._is_drafting = drafts
                    self._switch = Switch(drafts=drafts, reason=plan.reason)
        step = _Step(began_s=began_s, batch=batch, plan=plan)
        if plan.strategy is not None:
            requests = [each.active for each in scheduled if each.draws and each.num_tokens == 1]
            usable = [each for each in requests if self._depth_limit(each) > 0]
            step.requests = usable[: plan.num_requests]
        return step

    def _propose(self, step: _Step, sampler: Sampler) -> None:
        """Ask each drafter for proposals, cut to the depth that can be used.

        Drafters observe first. That is part of the first one's seconds, unless drafting paused.
        """
        assert step.plan.strategy is not None, "only a plan that drafts has requests"
        started_s, paused = self._clock(), self.observations.num_waiting > 1
        self.observations.send()
        if paused:
            step.catch_up_s = self._clock() - started_s
            started_s += step.catch_up_s
        noise = sampler.for_drafts(step.requests) if self.speculation.coupled else None
        draftable = [each.draftable(self._depth_limit(each)) for each in step.requests]
        for index in step.plan.drafters:
            found = self.drafters[index].propose(draftable, step.plan.strategy, noise)
            trees = [
                cut_depth(tree, each.max_depth) for tree, each in zip(found, draftable, strict=True)
            ]
            depths, ended_s = [tree.depth for tree in trees], self._clock()
            timing = DraftTiming(
                drafter=index,
                num_requests=len(trees),
                levels=max(depths),
                rows=sum(depths),
                seconds=ended_s - started_s,
            )
            started_s = ended_s
            step.proposals.append(trees)
            step.timings.append(timing)

    def _select(
        self, step: _Step, try_grow: Callable[[str, int], bool]
    ) -> dict[ActiveRequest, DraftTree]:
        """Return the drafts to verify: nodes that the tuner selects, where the KV has room."""
        with self._watch.section("tuner"):
            trees = self._tuner.select_nodes(step.batch, step.plan, step.proposals)
        assert sum(tree.size for tree in trees) <= step.batch.room, "drafts beyond the step's room"
        return {
            active: tree
            for active, tree in zip(step.requests, trees, strict=True)
            if tree.size and try_grow(active.request_id, len(active.tokens) + tree.size)
        }

    def _apply_feedback(self) -> float:
        """Pass the previous step to drafters, cost model, tuner and guard; return the seconds.

        A drafter learns how far its proposals match, nodes not verified included. The drafters'
        seconds are a cost of the drafts that they learn from, and count towards that step.
        """
        step, self._previous = self._previous, None
        if step is None or step.outcome is None:
            return 0.0
        started_s, outcome = self._clock(), step.outcome
        for timing, trees in zip(step.timings, step.proposals, strict=True):
            kept = [
                (tree, step.accepted[active.request_id].tokens)
                for tree, active in zip(trees, step.requests, strict=True)
                if tree.size
            ]
            self.drafters[timing.drafter].learn(
                [tree for tree, _ in kept], [follow(tree, tokens) for tree, tokens in kept]
            )
        if step.timings:
            outcome = replace(outcome, verify_s=outcome.verify_s + self._clock() - started_s)
        with self._watch.section("tuner"):
            if self._costs is not None:
                self._costs.learn(outcome)
            self._tuner.learn(outcome)
            if self._guard is not None and (reason := self._guard.learn(outcome)):
                self._is_drafting, self._switch = False, Switch(drafts=False, reason=reason)
        return self._clock() - started_s

    def _depth_limit(self, active: ActiveRequest) -> int:
        """Return the depth of the deepest useful node: the root yields a token as well."""
        left = active.request.sampling.max_tokens - active.num_generated
        return min(left - 1, self._max_depth)


def _batch(scheduled: Sequence[Scheduled], spare_tokens: int) -> Batch:
    draftable = sampled = tokens = pairs = 0
    for each in scheduled:
        count = each.num_tokens
        tokens += count
        pairs += count * (each.active.num_computed + count)
        if each.draws:
            sampled += 1
            draftable += count == 1
    return Batch(
        num_draftable=draftable,
        num_sampled=sampled,
        num_tokens=tokens,
        num_pairs=pairs,
        room=spare_tokens,
    )


def _verified(each: Scheduled, accepted: Accepted) -> Verified:
    """Return a verified draft; accepted nodes after the end of a completion do not count."""
    active = each.active
    position = active.num_computed - len(accepted.path) - active.prompt_len
    return Verified(
        request_id=active.request_id,
        position=position,
        num_drafted=each.draft.size,
        depth=each.draft.depth,
        num_accepted=max(min(len(accepted.path), active.num_generated - position - 1), 0),
    )
