"""The engine's side of speculation: what a step would be, whom to draft for, and who is told.

    scheduled --Batch--> guard, tuner.plan --Plan--> drafters propose --> tuner.select_nodes
        --> scheduled, with drafts  --(one target pass, `accept`)-->  Verified
        --> drafters observe before they are next asked
        --StepFeedback, while the next pass runs-->  drafters learn; Outcome --> costs, tuner, guard

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

from longtail.engine.batch import Scheduled
from longtail.engine.report import Switch, Verified
from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.clock import StepClock, WallClock
from longtail.engine.speculation.features import FeatureStore
from longtail.engine.speculation.feedback import StepFeedback
from longtail.engine.speculation.queue import Computed, ObservationQueue
from longtail.engine.step.noise import NoiseSource
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Draftable, Drafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import NO_TAPS
from longtail.speculation.tree import EMPTY, MAX_NODES, DraftTree, cut_depth, depths
from longtail.speculation.verify import Accepted
from longtail.tuner.cost import CostModel
from longtail.tuner.guard import Guard
from longtail.tuner.records import Batch, DraftTiming, Plan
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviewed:
    """What speculation says of a step that is over, and of what was learned meanwhile."""

    verified: tuple[Verified, ...] = ()
    readings: tuple[float, ...] = ()
    switch: Switch | None = None
    tuner_s: float = 0.0


NOTHING_SAID = Reviewed()


@final
class Speculator:
    """Speculation at work: `draft`, `settle` and `review` of a step come in turn."""

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
        self._step: StepFeedback | None = None
        """None: a step that repeats a plain one."""
        self._lesson: StepFeedback | None = None
        """Of the last step, as long as it was not learned."""
        self._repeats = self._num_repeated = 0
        self._drafts = True
        self._switch: Switch | None = None
        """That was not reported yet."""
        self._readings: list[float] = []
        self._tuner_s = self._learning_s = 0.0
        """Of the step in progress; the second went into the last one's lesson."""
        self.taps = NO_TAPS
        for drafter in speculation.drafters:
            self.taps = self.taps.union(drafter.taps)
        self._features = speculation.features
        if self._features is not None:
            self.taps = self.taps.union(self._features.taps)
            if before is None or before.speculation.features is not self._features:
                self._features.clear()  # the weights may have changed meanwhile
        lookbacks = [drafter.lookback for drafter in speculation.drafters]
        self._backlog = ObservationQueue(max(lookbacks) if all(lookbacks) else 0)
        if before is not None and before.taps == self.taps:
            self._backlog.inherit(before.backlog)
        windows = [window for window in model.config.windows if window]
        # A window counts places, and a place inside a draft has several slots.
        self._deepest = min(windows) - 1 if windows else MAX_NODES

    @property
    def backlog(self) -> ObservationQueue:
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

    def reset_estimates(self) -> None:
        """Note that a drafter was changed: it may be worth what it was not."""
        self.settle()
        self._repeats = 0
        self.speculation.tuner.reset_estimates()

    def rest(self) -> None:
        """Note that nothing is in progress."""
        self.settle()
        if self._drafts:
            self._tell()
        self._backlog.clear()
        self._dismiss()

    def leave(self, successors: Sequence[Drafter], unfinished: Iterable[str]) -> None:
        """Have drafters that are set aside forget all requests."""
        self.settle()
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
        self._readings, self._learning_s, self._tuner_s = [], 0.0, 0.0
        if self._repeats and len(scheduled) == self._num_repeated:
            self._repeats -= 1
            self._step = None
            return list(scheduled)
        step = self._step = self._planned(scheduled, spare_tokens)
        plan = step.plan
        self._repeats, self._num_repeated = plan.repeat_steps, len(scheduled)
        if plan.strategy is None:
            return list(scheduled)
        asking = [each for each in scheduled if each.draws and self._max_depth(each) > 0]
        asking = asking[: plan.num_requests or len(asking)]
        if not asking:
            return list(scheduled)
        self._tell()
        step.requests = [each.active for each in asking]
        noise.prepare([each.active for each in scheduled if each.draws], plan.strategy.depth)
        ahead = noise.for_drafts(step.requests, plan.strategy.depth)
        wanted = [self._draftable(each) for each in asking]
        self._read()
        for place in plan.drafters:
            drafter = self.speculation.drafters[place]
            heard = ahead if self.speculation.coupled else None
            trees = drafter.propose(wanted, plan.strategy, heard)
            trees = [
                cut_depth(tree, each.max_depth) for tree, each in zip(trees, wanted, strict=True)
            ]
            step.proposals.append(trees)
            step.timings.append(self._asked(place, trees, since=self._readings[-1]))
        drafts = self._spent(step, try_grow)
        return [
            Scheduled(
                active=each.active,
                num_tokens=each.num_tokens,
                draft=drafts.get(each.active, EMPTY),
            )
            for each in scheduled
        ]

    def settle(self, *, hidden: bool = True) -> None:
        """Have drafters, cost model, tuner and guard learn what the last step taught.

        While a pass is under way, or between two steps before anything changes, nobody waits for it
        (`hidden`), and no step's seconds grow. On a CPU the host learns when it has computed: then
        what drafters take counts as seconds of the step that they learn of, for drafting costs it,
        and the step in which they happen to learn is longer by nothing.
        """
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        before = 0.0 if hidden else self._read()
        lesson.teach(self.speculation.drafters)
        taught = 0.0 if hidden else self._read()
        began = time.perf_counter()
        outcome = lesson.outcome(taught - before)
        if self.costs is not None:
            self.costs.learn(outcome)
        self.speculation.tuner.learn(outcome)
        stopped = "" if self._guard is None else self._guard.learn(outcome)
        if stopped:
            self._drafts, self._switch = False, Switch(drafts=False, reason=stopped)
        if lesson.timings:  # what was learned may be another plan than the one that holds
            self._repeats = 0
        self._tuner_s += time.perf_counter() - began
        self._learning_s = 0.0 if hidden else self._read() - before

    def review(
        self,
        scheduled: Sequence[Scheduled],
        accepted: dict[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
    ) -> Reviewed:
        """Note what was computed, and what is to be learned of it.

        `features` are of all flat tokens of the step; the requests' texts hold the new tokens.
        """
        step = self._step
        ends = [each.active.num_computed for each in scheduled]
        self._backlog.add(Computed(scheduled, ends, accepted, features))
        if self._features is not None:
            wanted = self.taps.pick(self._features.taps, features)
            self._features.add(Computed(scheduled, ends, accepted, wanted))
        verified: tuple[Verified, ...] = ()
        if step is not None:
            drafted = [each for each in scheduled if each.draft.size]
            verified = tuple(
                _verified(each, accepted[each.active.request_id].path) for each in drafted
            )
            step.drafts, step.accepted = [each.draft for each in drafted], accepted
            drafts_s = sum(timing.seconds for timing in step.timings)
            step.verify_s = self._read() - drafts_s - self._learning_s
            self._lesson = step
        else:
            self._read()
        said = Reviewed(
            verified=verified,
            readings=tuple(self._readings),
            switch=self._switch,
            tuner_s=self._tuner_s,
        )
        self._switch = None
        return said

    def _read(self) -> float:
        self._readings.append(self.speculation.clock.read())
        return self._readings[-1]

    def _planned(self, scheduled: Sequence[Scheduled], spare: int) -> StepFeedback:
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
            num_draftable=asking,
            num_sampled=drawing,
            num_tokens=tokens,
            num_pairs=pairs,
            room=spare,
        )
        allowed = self._guard is None or self._guard.allows
        plan = self.speculation.tuner.plan(batch) if allowed and asking and spare > 0 else PLAIN
        self._notice(plan)
        self._tuner_s += time.perf_counter() - began
        return StepFeedback(batch=batch, plan=plan)

    def _spent(
        self, step: StepFeedback, try_grow: Callable[[str, int], bool]
    ) -> dict[ActiveRequest, DraftTree]:
        """Have the tuner choose what is verified, as far as there is room in the KV."""
        began = time.perf_counter()
        trees = self.speculation.tuner.select_nodes(step.batch, step.plan, step.proposals)
        self._tuner_s += time.perf_counter() - began
        assert sum(tree.size for tree in trees) <= step.batch.room, "drafts beyond the step's room"
        return {
            active: tree
            for active, tree in zip(step.requests, trees, strict=True)
            if tree.size and try_grow(active.request_id, len(active.tokens) + tree.size)
        }

    def _asked(self, place: int, trees: Sequence[DraftTree], *, since: float) -> DraftTiming:
        deep = [_depth(tree) for tree in trees]
        return DraftTiming(
            drafter=place,
            num_requests=len(trees),
            levels=max(deep),
            rows=sum(deep),
            seconds=self._read() - since,
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

    def _notice(self, plan: Plan) -> None:
        """Notice a change between drafting and decoding plainly."""
        drafts = plan.strategy is not None
        if plan.is_probe or plan is PLAIN or drafts == self._drafts:
            return
        self._drafts, self._switch = drafts, Switch(drafts=drafts, reason=plan.reason)

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
