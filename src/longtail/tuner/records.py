"""What passes between the engine and a tuner.

engine   --Batch-->    tuner.plan    --Plan-->     drafters propose
         --drafts-->   tuner.select_nodes   --drafts-->   one target pass
         --Outcome-->  tuner.learn
"""

from dataclasses import dataclass

from longtail.speculation.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step as it would be without drafts.

    Example: Batch(num_draftable=8, num_sampled=8, num_tokens=8, num_pairs=2400, room=500)
    """

    num_draftable: int
    """Requests that decode, and could use a draft unless they are about to end."""
    num_sampled: int
    """Requests that get a token; what a plain step yields."""
    num_tokens: int
    """Flat tokens, those of prompts included."""
    num_pairs: int
    """Pairs of a flat token and a token of its context."""
    room: int
    """Most draft nodes of the step."""

    @property
    def mean_context(self) -> float:
        """Tokens that a flat token attends to."""
        return self.num_pairs / self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Whom to ask for drafts, and of what shape.

    Example: Plan(strategy=None, reason="drafting at 64 running is predicted to give 0.95x")
    """

    strategy: Strategy | None
    """None: decode plainly."""
    drafters: tuple[int, ...] = (0,)
    """Who proposes, by place; their drafts become one tree."""
    num_requests: int | None = None
    """Number of requests to draft for, the first ones that can use a draft; None: all."""
    is_probe: bool = False
    """To learn something; says nothing of what is thought best."""
    repeat_steps: int = 0
    """Steps for which a plain one is repeated, as long as as many requests are scheduled: nobody is
    asked, nobody is told how they went, and they cost no more than without speculation."""
    reason: str = ""
    """Why, where the plan changes between drafting and not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTiming:
    """One drafter's proposals of a step.

    Example: DraftTiming(drafter=0, num_requests=8, levels=4, rows=27, seconds=0.0004)
    """

    drafter: int
    num_requests: int
    levels: int
    """Depth of the deepest draft: passes, for a drafter that has any."""
    rows: int
    """Depths of all drafts summed: rows of those passes."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step took and gave.

    Example: Outcome(batch=batch, plan=plan, timings=(), num_drafts=0, num_nodes=0, num_accepted=0,
                     verify_s=0.004)
    """

    batch: Batch
    plan: Plan
    timings: tuple[DraftTiming, ...]
    num_drafts: int
    """Requests whose draft was verified."""
    num_nodes: int
    """Nodes verified."""
    num_accepted: int
    verify_s: float
    """Seconds of the step less those of `timings`: all but the proposals."""
    num_expected: float = 0.0
    """Nodes that were expected to be accepted: those verified, by their probabilities."""

    @property
    def num_emitted(self) -> int:
        """Tokens of the step."""
        return self.batch.num_sampled + self.num_accepted

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.verify_s + sum(timing.seconds for timing in self.timings)
