"""Records that engine and tuner exchange.

engine   --Batch-->    tuner.plan           --Plan-->     drafters propose
         --drafts-->   tuner.select_nodes   --drafts-->   one target pass
         --Outcome-->  tuner.learn
"""

from dataclasses import dataclass, replace

from longtail.speculation.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step before drafts are added."""

    num_draftable: int
    """Number of decoding requests; a draft is useful unless the request is about to end."""
    num_sampled: int
    """Number of requests that get a token; the tokens of a plain step."""
    num_tokens: int
    """Number of flat tokens, prompt tokens included."""
    num_pairs: int
    """Number of pairs of a flat token and a token of its context."""
    room: int
    """Maximum number of draft nodes in the step."""

    @property
    def mean_context(self) -> float:
        """Mean number of tokens that a flat token attends to."""
        return self.num_pairs / self.num_tokens

    @property
    def decoding(self) -> "Batch":
        """The same requests in a step that reads no prompt."""
        num = self.num_sampled
        pairs = round(num * self.mean_context)
        return replace(self, num_draftable=num, num_tokens=num, num_pairs=pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Drafters to ask, and the shape of the drafts."""

    strategy: Strategy | None
    """Shape of the drafts; None: plain decoding."""
    drafters: tuple[int, ...] = (0,)
    """Indices of the drafters that propose; their drafts are merged."""
    num_requests: int | None = None
    """Number of requests to draft for, the first ones that can use a draft; None: all."""
    is_probe: bool = False
    """Whether the step only measures; a probe does not change the reported state."""
    reason: str = ""
    """Reason of a change between drafting and plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTiming:
    """Size and seconds of one drafter's proposals in a step."""

    drafter: int
    num_requests: int
    levels: int
    """Depth of the deepest draft: the number of passes of a drafter model."""
    rows: int
    """Sum of the drafts' depths: the number of rows of those passes."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Costs and yield of a step."""

    batch: Batch
    plan: Plan
    timings: tuple[DraftTiming, ...]
    num_drafts: int
    """Number of verified drafts."""
    num_nodes: int
    """Number of verified nodes."""
    num_accepted: int
    verify_s: float
    """Seconds of the step without `timings` and `catch_up_s`."""
    catch_up_s: float = 0.0
    """Seconds in which drafters observed the tokens since they last drafted, after a pause. The
    guard counts them apart from the cost of drafts: drafting in each step has none."""
    num_expected: float = 0.0
    """Expected number of accepted nodes: the sum of the verified nodes' probabilities."""

    @property
    def num_emitted(self) -> int:
        """Number of tokens that the step yields."""
        return self.batch.num_sampled + self.num_accepted

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.verify_s + self.catch_up_s + sum(timing.seconds for timing in self.timings)
