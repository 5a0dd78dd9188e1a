"""The plan of a step's drafts: whether to draft, proposals, the nodes that are verified; feedback.

    scheduled --Batch--> guard, tuner.plan --Plan--> drafters propose --> tuner.select_nodes

A draft uses only spare resources: tokens that the step has left and KV that no request owns. It
never preempts a request. All cuts of drafts after `Drafter.propose` are made here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.runner import StepClock, StepTimer
from longtail.generator import Switch, Verified
from longtail.speculation.drafter import Drafter, Noise
from longtail.speculation.tree import Accepted, DraftTree, cut_depth, follow
from longtail.tuner.cost import CostModel
from longtail.tuner.guard import Guard
from longtail.tuner.records import Batch, DraftTiming, Outcome, Plan
from longtail.tuner.tuner import PLAIN, Tuner


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """Plan of one step, and the drafts proposed for it."""

    batch: Batch
    plan: Plan
    requests: Sequence[ActiveRequest] = ()
    """Requests for which drafts are proposed, in order."""
    proposals: Sequence[Sequence[DraftTree]] = ()
    """Trees by drafter of the plan, then by request."""
    timings: tuple[DraftTiming, ...] = ()
    catch_up_s: float = 0.0
    """Seconds in which drafters observed the tokens of several steps, after a pause of drafting."""


@final
class DraftPlanner:
    """Plans with guard and tuner: `plan`, `propose`, `select` and `record` in each step.

    A plan to decode plainly may hold for several steps (`take_repeat`). `apply` passes the feedback
    of a step to drafters, cost model, tuner and guard, one step late:

        draft, run n | apply n - 1 | record n, draft, run n + 1 | apply n
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        tuner: Tuner,
        guard: Guard | None,
        costs: CostModel | None,
        clock: StepClock,
        max_depth: int,
    ) -> None:
        self._drafters, self._tuner, self._guard, self._costs = drafters, tuner, guard, costs
        self.timer = StepTimer(drafters)
        self._clock, self._max_depth = clock, max_depth
        self._pending: tuple[PlannedStep, list[DraftTree], Mapping[str, Accepted], float] | None
        self._pending = None
        """A step, its verified drafts and their results, and its seconds: without the drafters',
        and without applying the feedback of the step before."""
        self._exposed_s = 0.0
        """Seconds that applying the previous feedback added to the present step."""
        self._repeats = self._num_repeated = 0
        self._switch: Switch | None = None
        self.is_drafting = True
        """Whether the last plan drafts; probes do not count."""

    def take_repeat(self, num_scheduled: int) -> bool:
        """Return whether the last plan still holds, and use up one of its repetitions."""
        if not self._repeats or num_scheduled != self._num_repeated:
            return False
        self._repeats -= 1
        if self._guard is not None:
            self._guard.count_repeat()
        return True

    def take_switch(self) -> Switch | None:
        """Return the change between drafting and plain decoding that was not yet reported."""
        switch, self._switch = self._switch, None
        return switch

    def plan(self, scheduled: Sequence[Scheduled], spare_tokens: int) -> PlannedStep:
        """Decide whether to draft in a step, and for which requests."""
        with self.timer.tuner:
            batch = _batch(scheduled, spare_tokens)
            allowed = self._guard is None or self._guard.allows(batch)
            allowed = allowed and bool(self._drafters)
            may_draft = allowed and batch.num_draftable and spare_tokens > 0
            plan = self._tuner.plan(batch) if may_draft else PLAIN
            if plan is not PLAIN and not plan.is_probe:
                self._set_drafting(plan.strategy is not None, plan.reason)
        self._repeats, self._num_repeated = plan.repeat_steps, len(scheduled)
        if plan.strategy is None:
            return PlannedStep(batch, plan)
        requests = [
            each.active
            for each in scheduled
            if each.draws and each.num_tokens == 1 and self._depth_limit(each.active) > 0
        ]
        return PlannedStep(batch, plan, requests[: plan.num_requests])

    def propose(self, step: PlannedStep, noise: Noise | None, began_s: float) -> PlannedStep:
        """Return the step with each drafter's proposals, cut to the depth that can be used.

        The time since `began_s`, in which drafters observed, is part of the first one's.
        """
        assert step.plan.strategy is not None, "only a plan that drafts has requests"
        draftable = [each.draftable(self._depth_limit(each)) for each in step.requests]
        proposals: list[list[DraftTree]] = []
        timings: list[DraftTiming] = []
        started = began_s
        for index in step.plan.drafters:
            found = self._drafters[index].propose(draftable, step.plan.strategy, noise)
            trees = [
                cut_depth(tree, each.max_depth) for tree, each in zip(found, draftable, strict=True)
            ]
            depths = [tree.depth for tree in trees]
            ended = self._clock.read()
            timing = DraftTiming(
                drafter=index,
                num_requests=len(trees),
                levels=max(depths),
                rows=sum(depths),
                seconds=ended - started,
            )
            started = ended
            proposals.append(trees)
            timings.append(timing)
        return replace(step, proposals=proposals, timings=tuple(timings))

    def select(
        self, step: PlannedStep, try_grow: Callable[[str, int], bool]
    ) -> dict[ActiveRequest, DraftTree]:
        """Return the drafts to verify: nodes that the tuner selects, where the KV has room."""
        with self.timer.tuner:
            trees = self._tuner.select_nodes(step.batch, step.plan, step.proposals)
        assert sum(tree.size for tree in trees) <= step.batch.room, "drafts beyond the step's room"
        return {
            active: tree
            for active, tree in zip(step.requests, trees, strict=True)
            if tree.size and try_grow(active.request_id, len(active.tokens) + tree.size)
        }

    def record(
        self,
        step: PlannedStep | None,
        scheduled: Sequence[Scheduled],
        accepted: Mapping[str, Accepted],
    ) -> tuple[Verified, ...]:
        """Keep the feedback of a step, and return how its drafts fared; None: a repeated step."""
        if step is None:
            self._clock.read()
            return ()
        drafted = [each for each in scheduled if each.draft.size]
        verified = tuple(_verified(each, accepted[each.active.request_id]) for each in drafted)
        drafts_s = sum(timing.seconds for timing in step.timings)
        verify_s = self._clock.read() - drafts_s - step.catch_up_s - self._exposed_s
        drafts = [each.draft for each in drafted]
        self._pending = step, drafts, accepted, verify_s
        return verified

    def apply(self, *, hidden: bool = True) -> None:
        """Pass the previous step, if planned, to drafters, cost model, tuner and guard.

        A drafter learns how far its proposals match, nodes not verified included.
        `hidden`: no step is in progress that waits for it. Otherwise the drafters' seconds count
        towards the step that they learn from, since they are a cost of its drafts, and none
        towards the present step.
        """
        feedback, self._pending, self._exposed_s = self._pending, None, 0.0
        if feedback is None:
            return
        started = 0.0 if hidden else self._clock.read()
        step, drafts, accepted, verify_s = feedback
        for timing, trees in zip(step.timings, step.proposals, strict=True):
            kept = [
                (tree, accepted[active.request_id].tokens)
                for tree, active in zip(trees, step.requests, strict=True)
                if tree.size
            ]
            self._drafters[timing.drafter].learn(
                [tree for tree, _ in kept], [follow(tree, tokens) for tree, tokens in kept]
            )
        ended = 0.0 if hidden else self._clock.read()
        with self.timer.tuner:
            outcome = Outcome(
                batch=step.batch,
                plan=step.plan,
                timings=step.timings,
                catch_up_s=step.catch_up_s,
                num_drafts=len(drafts),
                num_nodes=sum(draft.size for draft in drafts),
                num_accepted=sum(len(each.path) for each in accepted.values()),
                verify_s=verify_s + (ended - started),
                num_expected=sum((sum(draft.reach) for draft in drafts), 0.0),
            )
            if self._costs is not None:
                self._costs.learn(outcome)
            self._tuner.learn(outcome)
            if self._guard is not None and (reason := self._guard.learn(outcome)):
                self.is_drafting, self._switch = False, Switch(drafts=False, reason=reason)
            if outcome.timings:  # after a step with drafts the next plan is made anew
                self._repeats = 0
        self._exposed_s = 0.0 if hidden else self._clock.read() - started

    def reset_estimates(self) -> None:
        """Estimate the gain of drafting anew, since a drafter was changed."""
        self.apply()
        self._repeats = 0
        self._tuner.reset_estimates()

    def _set_drafting(self, drafts: bool, reason: str) -> None:
        if drafts != self.is_drafting:
            self.is_drafting, self._switch = drafts, Switch(drafts=drafts, reason=reason)

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
    num_accepted = len(accepted.path)
    return Verified(
        request_id=each.active.request_id,
        position=each.active.num_computed - num_accepted - each.active.prompt_len,
        num_drafted=each.draft.size,
        depth=each.draft.depth,
        num_accepted=num_accepted,
    )
