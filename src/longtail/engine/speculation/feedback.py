"""Feedback of a step: recorded at its end, applied while the next step is computed.

    host      draft, launch n | apply n - 1 | wait, accept n, draft, launch n + 1 | apply n
    device                    +- computes n -+ (gap)                              +- computes n + 1

The next step needs none of it, so the device never waits for it. Feedback is one step late on a
CPU, too: decisions do not depend on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from longtail.engine.batch import Scheduled
from longtail.engine.report import Verified
from longtail.engine.speculation.planner import DraftPlanner, PlannedStep
from longtail.engine.step.timer import StepClock, StepTimer
from longtail.speculation.drafter import Drafter
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted, follow
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Outcome


@dataclass(frozen=True, slots=True)
class StepFeedback:
    """Result of one planned step."""

    step: PlannedStep
    drafts: Sequence[DraftTree]
    """Drafts that were verified."""
    accepted: Mapping[str, Accepted]
    verify_s: float
    """Seconds of the step without `step.timings` and without applying the previous feedback."""

    def send_to_drafters(self, drafters: Sequence[Drafter]) -> None:
        """Report to each drafter how far its proposals match, nodes not verified included."""
        for timing, trees in zip(self.step.timings, self.step.proposals, strict=True):
            kept = [
                (tree, self.accepted[active.request_id].tokens)
                for tree, active in zip(trees, self.step.requests, strict=True)
                if tree.size
            ]
            drafters[timing.drafter].learn(
                [tree for tree, _ in kept], [follow(tree, tokens) for tree, tokens in kept]
            )

    def outcome(self, learning_s: float) -> Outcome:
        """Return the step's costs and yield; `learning_s` are the drafters' seconds of learning."""
        return Outcome(
            batch=self.step.batch,
            plan=self.step.plan,
            timings=self.step.timings,
            catch_up_s=self.step.catch_up_s,
            num_drafts=len(self.drafts),
            num_nodes=sum(draft.size for draft in self.drafts),
            num_accepted=sum(len(each.path) for each in self.accepted.values()),
            verify_s=self.verify_s + learning_s,
            num_expected=sum((sum(draft.reach) for draft in self.drafts), 0.0),
        )


@final
class FeedbackLoop:
    """Passes the feedback of each step to drafters, cost model, tuner and guard, one step late."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: CostModel | None,
        planner: DraftPlanner,
        clock: StepClock,
        timer: StepTimer,
    ) -> None:
        self._drafters, self._costs, self._planner = drafters, costs, planner
        self._clock, self._timer = clock, timer
        self._pending: StepFeedback | None = None
        self._exposed_s = 0.0
        """Seconds that applying the previous feedback added to the present step."""

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
        self._pending = StepFeedback(step, drafts, accepted, verify_s)
        return verified

    def apply(self, *, hidden: bool = True) -> None:
        """Pass the previous step, if planned, to drafters, cost model, tuner and guard.

        `hidden`: no step waits for it, because a pass is in progress or no step is. On a CPU it is
        not hidden: the drafters' seconds count towards the step that they learn from, since they
        are a cost of its drafts, and no seconds of it count towards the present step.
        """
        feedback, self._pending, self._exposed_s = self._pending, None, 0.0
        if feedback is None:
            return
        started = 0.0 if hidden else self._clock.read()
        feedback.send_to_drafters(self._drafters)
        ended = 0.0 if hidden else self._clock.read()
        with self._timer.tuner:
            outcome = feedback.outcome(ended - started)
            if self._costs is not None:
                self._costs.learn(outcome)
            self._planner.learn(outcome)
        self._exposed_s = 0.0 if hidden else self._clock.read() - started


def _verified(each: Scheduled, accepted: Accepted) -> Verified:
    num_accepted = len(accepted.path)
    return Verified(
        request_id=each.active.request_id,
        position=each.active.num_computed - num_accepted - each.active.prompt_len,
        num_drafted=each.draft.size,
        depth=each.draft.depth,
        num_accepted=num_accepted,
    )
