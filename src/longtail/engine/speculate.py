"""The engine's side of speculation: what a step would be, whom to draft for, and who is told.

    scheduled --Batch--> guard, tuner.plan --Plan--> drafters propose --> tuner.spend
        --> scheduled, with drafts  --(one target pass, `accept`)-->  Verified
        --> drafters learn now, and observe before they are next asked; Outcome --> tuner, guard

A draft takes only what is left over: flat tokens of the step, KV that nobody owns. It preempts
nobody. Switching between drafting and decoding plainly touches no KV and computes nothing again.
It owns the drafters' news and the clock, and counts nothing that decides a token.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.engine.backlog import Backlog, Computed
from longtail.engine.batch import Scheduled
from longtail.engine.clock import StepClock, WallClock
from longtail.engine.features import FeatureStore
from longtail.engine.noise import NoiseSource
from longtail.engine.report import Switch, Verified
from longtail.engine.request import ActiveRequest
from longtail.model.transformer import NO_TAPS, Transformer
from longtail.speculation.drafter import Draftable, Drafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree, cut_depth, depths
from longtail.speculation.verify import Accepted, follow
from longtail.tuner.cost import CostModel
from longtail.tuner.guard import Guard
from longtail.tuner.records import Asked, Batch, Outcome, Plan
from longtail.tuner.tuner import PLAIN, FixedTuner, Tuner


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine speculates.

    Example: Speculation(drafters=(HistoryDrafter(),), tuner=BudgetTuner())
    """

    drafters: tuple[Drafter, ...]
    tuner: Tuner
    coupled: bool = True
    """Draft with the noise that the target will draw with; off only to compare."""
    guarded: bool = True
    """Pause drafting that loses against plain decoding; off only to compare."""
    clock: StepClock = field(default_factory=WallClock)
    features: FeatureStore | None = None
    """Keeps what the target computes, for whoever trains a drafter."""

    @staticmethod
    def fixed(
        drafter: Drafter, strategy: Strategy, *, coupled: bool = True, max_running: int = 0
    ) -> "Speculation":
        """Draft by one strategy whatever it costs, in steps with at most `max_running` requests."""
        tuner = FixedTuner(strategy, max_running=max_running)
        return Speculation(drafters=(drafter,), tuner=tuner, coupled=coupled, guarded=False)

    @property
    def needs_costs(self) -> bool:
        """Tell whether somebody asks what steps cost."""
        return self.guarded or self.tuner.needs_costs


@dataclass(slots=True)
class _Step:
    """What is known of the step in progress."""

    batch: Batch
    plan: Plan
    asked: list[Asked] = field(default_factory=list)
    proposals: list[list[DraftTree]] = field(default_factory=list)
    """Of each drafter that was asked, of each request that it was asked for."""
    requests: list[ActiveRequest] = field(default_factory=list)
    readings: list[float] = field(default_factory=list)
    tuner_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """What speculation says of a step that is over."""

    verified: tuple[Verified, ...] = ()
    readings: tuple[float, ...] = ()
    """Of the clock: before the proposals, after each, and at the end."""
    switch: Switch | None = None
    tuner_s: float = 0.0


NOTHING_SAID = Reviewed()


@final
class Speculator:
    """Speculation at work; `draft`, `review` and `finish` of one step come in turn."""

    def __init__(
        self,
        speculation: Speculation,
        model: Transformer,
        costs: CostModel | None,
        before: "Speculator | None" = None,
    ) -> None:
        self.speculation = speculation
        self.costs = costs if speculation.needs_costs else None
        self._guard = None
        if speculation.guarded:
            assert costs is not None, "the guard judges by what was measured"
            self._guard = Guard(costs)
        self._leaving: list[str] = []
        self._step: _Step | None = None
        """None: a step that repeats a plain one."""
        self._repeats = self._num_repeated = 0
        self._drafts = True
        self.taps = NO_TAPS
        for drafter in speculation.drafters:
            self.taps = self.taps.union(drafter.taps)
        self._features = speculation.features
        if self._features is not None:
            self.taps = self.taps.union(self._features.taps)
            if before is None or before.speculation.features is not self._features:
                self._features.clear()  # the weights may have changed meanwhile
        lookbacks = [drafter.lookback for drafter in speculation.drafters]
        self._backlog = Backlog(max(lookbacks) if all(lookbacks) else 0)
        if before is not None and before.taps == self.taps:
            self._backlog.inherit(before.backlog)
        windows = [window for window in model.config.windows if window]
        # A window counts places, and a place inside a draft has several slots.
        self._deepest = min(windows) - 1 if windows else MAX_NODES

    @property
    def backlog(self) -> Backlog:
        """What drafters were not told yet, for a successor with the same taps."""
        return self._backlog

    def forget(self, active: ActiveRequest) -> None:
        """Tell that a request is done; those who read texts are told the end of this one first."""
        for drafter in self.speculation.drafters:
            if drafter.taps.any:
                drafter.forget(active.request_id)
            else:
                self._leaving.append(active.request_id)

    def refresh(self) -> None:
        """Tell that the target's weights have changed; no request is in progress."""
        for drafter in self.speculation.drafters:
            drafter.refresh()
        if self._features is not None:
            self._features.clear()

    def look_again(self) -> None:
        """Note that a drafter was changed: it may be worth what it was not."""
        self._repeats = 0
        self.speculation.tuner.look_again()

    def rest(self) -> None:
        """Note that nothing is in progress."""
        if self._drafts:
            self._tell()
        self._backlog.clear()
        self._dismiss()

    def leave(self, successors: Sequence[Drafter], unfinished: Iterable[str]) -> None:
        """Have drafters that are set aside forget all requests."""
        self._dismiss()
        for drafter in self.speculation.drafters:
            if not any(drafter is each for each in successors):
                for request_id in unfinished:
                    drafter.forget(request_id)

    def draft(
        self,
        scheduled: Sequence[Scheduled],
        noise: NoiseSource,
        spare_tokens: int,
        try_grow: Callable[[str, int], bool],
    ) -> list[Scheduled]:
        """Return what was scheduled, with drafts of `spare_tokens` nodes in all at most."""
        self.speculation.clock.begin()
        if self._repeats and len(scheduled) == self._num_repeated:
            self._repeats -= 1
            self._step = None
            return list(scheduled)
        step = self._step = self._planned(scheduled, spare_tokens)
        plan = step.plan
        self._repeats, self._num_repeated = plan.holds, len(scheduled)
        if plan.strategy is None:
            return list(scheduled)
        asking = [each for each in scheduled if each.draws and self._max_depth(each) > 0]
        asking = asking[: plan.num_requests or len(asking)]
        if not asking:
            return list(scheduled)
        self._tell()
        step.requests = [each.active for each in asking]
        noise.reach([each.active for each in scheduled if each.draws], plan.strategy.depth)
        ahead = noise.ahead(step.requests, plan.strategy.depth)
        wanted = [self._draftable(each) for each in asking]
        step.readings.append(self.speculation.clock.read())
        for place in plan.drafters:
            drafter = self.speculation.drafters[place]
            heard = ahead if self.speculation.coupled else None
            trees = drafter.propose(wanted, plan.strategy, heard)
            trees = [
                cut_depth(tree, each.max_depth) for tree, each in zip(trees, wanted, strict=True)
            ]
            step.proposals.append(trees)
            step.asked.append(self._asked(place, trees))
        drafts = self._spent(step, try_grow)
        return [
            Scheduled(
                active=each.active,
                num_tokens=each.num_tokens,
                draft=drafts.get(each.active, EMPTY),
            )
            for each in scheduled
        ]

    def review(
        self,
        scheduled: Sequence[Scheduled],
        accepted: dict[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
    ) -> Reviewed:
        """Note what was computed; tell drafters how their proposals fared, tuners what they cost.

        `features` are of all flat tokens of the step; the requests' texts hold the new tokens.
        """
        step = self._step
        ends = [each.active.num_computed for each in scheduled]
        self._backlog.add(Computed(scheduled, ends, accepted, features))
        if self._features is not None:
            wanted = self.taps.pick(self._features.taps, features)
            self._features.add(Computed(scheduled, ends, accepted, wanted))
        if step is None:
            return Reviewed(readings=(self.speculation.clock.read(),))
        verified = tuple(
            _verified(each, accepted[each.active.request_id].path)
            for each in (scheduled if step.asked else ())
            if each.draft.size
        )
        for asked, trees in zip(step.asked, step.proposals, strict=True):
            kept = [
                (tree, active)
                for tree, active in zip(trees, step.requests, strict=True)
                if tree.size
            ]
            self.speculation.drafters[asked.drafter].learn(
                [tree for tree, _ in kept],
                [follow(tree, accepted[active.request_id].tokens) for tree, active in kept],
            )
        return self._finished(step, verified)

    def _finished(self, step: _Step, verified: tuple[Verified, ...]) -> Reviewed:
        """Read the clock, and tell tuner and guard how the step went."""
        drafts_s = step.readings[-1] - step.readings[0] if step.readings else 0.0
        took = self.speculation.clock.read()
        began = time.perf_counter()
        outcome = Outcome(
            batch=step.batch,
            plan=step.plan,
            asked=tuple(step.asked),
            num_drafts=len(verified),
            num_nodes=sum(each.num_drafted for each in verified),
            num_accepted=sum(each.num_accepted for each in verified),
            verify_s=took - drafts_s,
        )
        if self.costs is not None:
            self.costs.learn(outcome)
        self.speculation.tuner.learn(outcome)
        stopped = "" if self._guard is None else self._guard.learn(outcome)
        switch = self._switch(step.plan, stopped)
        step.tuner_s += time.perf_counter() - began
        return Reviewed(
            verified=verified,
            readings=(*step.readings, took),
            switch=switch,
            tuner_s=step.tuner_s,
        )

    def _planned(self, scheduled: Sequence[Scheduled], spare: int) -> _Step:
        """Ask guard and tuner what to do."""
        began = time.perf_counter()
        asking = drawing = tokens = pairs = 0
        for each in scheduled:
            count, computed = each.num_tokens, each.active.num_computed
            tokens += count
            pairs += count * (computed + count)
            if each.draws:
                drawing += 1
                asking += count == 1
        batch = Batch(
            num_asking=asking, num_drawing=drawing, num_tokens=tokens, num_pairs=pairs, room=spare
        )
        allowed = self._guard is None or self._guard.allows
        plan = self.speculation.tuner.plan(batch) if allowed and asking and spare > 0 else PLAIN
        return _Step(batch=batch, plan=plan, tuner_s=time.perf_counter() - began)

    def _spent(
        self, step: _Step, try_grow: Callable[[str, int], bool]
    ) -> dict[ActiveRequest, DraftTree]:
        """Have the tuner choose what is verified, as far as there is room in the KV."""
        began = time.perf_counter()
        trees = self.speculation.tuner.spend(step.batch, step.plan, step.proposals)
        step.tuner_s += time.perf_counter() - began
        assert sum(tree.size for tree in trees) <= step.batch.room, "drafts beyond the step's room"
        return {
            active: tree
            for active, tree in zip(step.requests, trees, strict=True)
            if tree.size and try_grow(active.request_id, len(active.tokens) + tree.size)
        }

    def _asked(self, place: int, trees: Sequence[DraftTree]) -> Asked:
        step = self._step
        assert step is not None, "asked inside a step"
        before = step.readings[-1]
        step.readings.append(self.speculation.clock.read())
        deep = [_depth(tree) for tree in trees]
        return Asked(
            drafter=place,
            num_requests=len(trees),
            levels=max(deep),
            rows=sum(deep),
            seconds=step.readings[-1] - before,
        )

    def _tell(self) -> None:
        """Have drafters observe all that they were not told."""
        text_only = not all(drafter.taps.any for drafter in self.speculation.drafters)
        for news in self._backlog.take(with_done=text_only):
            for drafter in self.speculation.drafters if news.seen else ():
                drafter.observe(news.seen, self.taps.pick(drafter.taps, news.features))
                for request_id in news.done:
                    drafter.forget(request_id)

        self._dismiss()

    def _dismiss(self) -> None:
        for drafter in self.speculation.drafters:
            if not drafter.taps.any:
                for request_id in self._leaving:
                    drafter.forget(request_id)
        self._leaving.clear()

    def _switch(self, plan: Plan, stopped: str) -> Switch | None:
        """Notice a change between drafting and decoding plainly."""
        if stopped:
            self._drafts = False
            return Switch(drafts=False, reason=stopped)
        drafts = plan.strategy is not None
        if plan.is_probe or plan is PLAIN or drafts == self._drafts:
            return None
        self._drafts = drafts
        return Switch(drafts=drafts, reason=plan.reason)

    def _max_depth(self, each: Scheduled) -> int:
        """Deepest node of use: the root yields a token, too."""
        if each.num_tokens != 1:
            return 0
        left = each.active.request.sampling.max_tokens - each.active.num_generated
        return min(left - 1, self._deepest)

    def _draftable(self, each: Scheduled) -> Draftable:
        active = each.active
        return Draftable(
            request_id=active.request_id,
            tokens=active.tokens,
            prompt_len=active.prompt_len,
            sampling=active.request.sampling,
            max_depth=self._max_depth(each),
        )


def _verified(each: Scheduled, path: tuple[int, ...]) -> Verified:
    draft = each.draft
    return Verified(
        request_id=each.active.request_id,
        position=each.active.num_computed - len(path) - each.active.prompt_len,
        num_drafted=draft.size,
        depth=_depth(draft),
        num_accepted=len(path),
    )


def _depth(tree: DraftTree) -> int:
    return max(depths(tree.parents), default=0)
