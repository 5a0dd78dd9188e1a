"""What a step teaches: kept until it is over, and learned while the next one is computed.

    host      draft, launch n | learn of n - 1 | wait, accept n, draft, launch n + 1 | learn of n
    device                    +-- computes n --+ (the gap)                           +-- computes

Nothing that a step teaches is needed by the very next one, so no device waits for it. Everybody
learns one step late, on a CPU, too: what is decided does not depend on where it is computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from longtail.engine.request import ActiveRequest
from longtail.speculation.drafter import Drafter
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted, follow
from longtail.tuner.records import Batch, DraftTiming, Outcome, Plan


@dataclass(slots=True)
class StepFeedback:
    """A step as it was planned, what was proposed for it, and what came of it."""

    batch: Batch
    plan: Plan
    timings: list[DraftTiming] = field(default_factory=list)
    proposals: list[list[DraftTree]] = field(default_factory=list)
    """Of each drafter that was asked, of each request that it was asked for."""
    requests: list[ActiveRequest] = field(default_factory=list)
    drafts: Sequence[DraftTree] = ()
    """Those that were verified."""
    accepted: Mapping[str, Accepted] = field(default_factory=dict)
    verify_s: float = 0.0
    """Seconds of the step without `timings` and without applying the previous feedback."""

    def teach(self, drafters: Sequence[Drafter]) -> None:
        """Tell drafters how their proposals fared, the nodes that were not verified included."""
        for timing, trees in zip(self.timings, self.proposals, strict=True):
            kept = [
                (tree, active)
                for tree, active in zip(trees, self.requests, strict=True)
                if tree.size
            ]
            drafters[timing.drafter].learn(
                [tree for tree, _ in kept],
                [follow(tree, self.accepted[active.request_id].tokens) for tree, active in kept],
            )

    def outcome(self, learning_s: float) -> Outcome:
        """Say what the step took and gave; `learning_s` is what drafters took to learn of it."""
        return Outcome(
            batch=self.batch,
            plan=self.plan,
            timings=tuple(self.timings),
            num_drafts=len(self.drafts),
            num_nodes=sum(draft.size for draft in self.drafts),
            num_accepted=sum(len(each.path) for each in self.accepted.values()),
            verify_s=self.verify_s + learning_s,
            num_expected=sum((sum(draft.reach) for draft in self.drafts), 0.0),
        )
