"""What a rollout cost and where its time went, counted step by step."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from longtail.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """One token as it is drawn, for those who stream."""

    request_id: str
    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some text of one completion, as it is streamed.

    Example: Piece(text=" the same", drafted=True)
    """

    text: str
    drafted: bool
    """A draft foretold it; the last token of every step is the target's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """How the draft of one request fared in a step.

    Example: Verified(request_id="a", position=40, num_drafted=6, depth=4, num_accepted=2): of a
    draft of six nodes, four deep, behind 40 generated tokens, two were accepted; accept length 3
    """

    request_id: str
    position: int
    """Generated tokens before the step."""
    num_drafted: int
    depth: int
    """Of the deepest node."""
    num_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request that ended with an exception of its own; the engine and all others go on.

    Example: Failed(request_id="a", error=NonFiniteError("logits of request 'a' ..."))
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """From this step on the engine drafts, or decodes plainly; what the guard stops, from the next.

    Example: Switch(drafts=False, reason="predicted 0.93x of plain decoding at 64 running")
    """

    drafts: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One engine step.

    Example: StepReport(num_tokens=9, num_running=9, step_s=0.004, forward_s=0.0035,
                        sample_s=0.0002, emitted=(...), finished=())
    """

    num_tokens: int
    """Flat tokens computed, drafts included."""
    num_running: int
    step_s: float
    forward_s: float
    """Decoder and LM head."""
    sample_s: float
    """Noise, for drafts too, and draws."""
    gap_s: float = 0.0
    """Of the host alone: before the pass was launched and after its results were there, the
    drafter's forward passes excluded. So long a GPU has at most drafts to compute."""
    emitted: tuple[Emitted, ...]
    finished: tuple[Completion, ...]
    failed: tuple[Failed, ...] = ()
    draft_s: float = 0.0
    """Asking for drafts, the drafter's forward passes included, following and keeping them, telling
    the drafter how those of the step before fared."""
    draft_forward_s: float = 0.0
    """The drafter's forward passes alone."""
    verified: tuple[Verified, ...] = ()
    """Requests that had a draft."""
    tuner_s: float = 0.0
    """Deciding how much to draft, and learning from the step before."""
    readings: tuple[float, ...] = ()
    """Of the clock that the tuner goes by: before the proposals and after each; on a CPU, where a
    step before is learned from: before, when drafters have learned, and when all have; the end."""
    switch: Switch | None = None


_PARTS_S = ("engine_s", "forward_s", "sample_s", "gap_s", "draft_s", "draft_forward_s", "tuner_s")
"""Times of an engine's work and of its parts, which come one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """A whole rollout phase."""

    seconds: float
    engine_s: float
    """In engine steps: of several engines the mean one's, which then waited for the last."""
    forward_s: float
    sample_s: float
    gap_s: float = 0.0
    """Of the host alone, as in a step."""
    num_steps: int
    num_generated: int
    num_computed: int
    """Flat tokens computed: generated ones, prompts, and recomputation after preemption."""
    num_drafted: int
    """Draft nodes verified."""
    num_accepted: int
    num_verified: int
    """Drafts verified; `num_accepted` + `num_verified` tokens came of them."""
    draft_s: float
    """Drafting, the drafter's forward passes included."""
    draft_forward_s: float
    tuner_s: float
    """Deciding how much to draft."""
    max_running: int
    """Most requests that ran at one time."""
    running_s: float
    """Request-seconds: running requests summed over time."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_generated / self.seconds if self.seconds else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens emitted a verify step, the bonus token included; 0 without any verify step."""
        verified = self.num_verified
        return (self.num_accepted + verified) / verified if verified else 0.0

    @property
    def draft_overhead_share(self) -> float:
        """Share of the time that drafting and verification took beside all forward passes."""
        return self._share(self.draft_s - self.draft_forward_s)

    @property
    def draft_share(self) -> float:
        """Share of the time that drafting took."""
        return self._share(self.draft_s)

    @property
    def tuner_share(self) -> float:
        """Share of the time that deciding took."""
        return self._share(self.tuner_s)

    @property
    def bookkeeping_share(self) -> float:
        """Share of the time outside the sampler and all forward passes, the drafter's too."""
        inside = self.forward_s + self.sample_s + self.draft_forward_s
        return self._share(self.engine_s - inside)

    def _share(self, part_s: float) -> float:
        return part_s / self.engine_s if self.engine_s else 0.0

    @property
    def tail_idle_share(self) -> float:
        """Share of the engine's places that stood empty while the longest completions went on."""
        capacity = self.max_running * self.seconds
        return 1 - self.running_s / capacity if capacity else 0.0


def merge_reports(reports: Sequence[RolloutReport], seconds: float) -> RolloutReport:
    """Sum up one rollout by several engines at once, which took so long in all.

    Counts and places are those of all; times of work are the mean engine's.
    """
    rows = [asdict(report) for report in reports]
    totals = {name: sum(row[name] for row in rows) for name in rows[0]}
    means = {name: totals[name] / len(rows) for name in _PARTS_S}
    return RolloutReport(**totals | means | {"seconds": seconds})


@dataclass(slots=True)
class RolloutMeter:
    """Sums step reports into a rollout report."""

    _sums: dict[str, float] = field(default_factory=dict)
    _max_running: int = 0

    def add(self, step: StepReport) -> None:
        """Count one step."""
        counts = {
            "seconds": step.step_s,
            "forward_s": step.forward_s,
            "sample_s": step.sample_s,
            "gap_s": step.gap_s,
            "draft_s": step.draft_s,
            "draft_forward_s": step.draft_forward_s,
            "tuner_s": step.tuner_s,
            "running_s": step.step_s * step.num_running,
            "num_steps": 1,
            "num_generated": len(step.emitted),
            "num_computed": step.num_tokens,
            "num_drafted": sum(each.num_drafted for each in step.verified),
            "num_accepted": sum(each.num_accepted for each in step.verified),
            "num_verified": len(step.verified),
        }
        for name, value in counts.items():
            self._sums[name] = self._sums.get(name, 0) + value
        self._max_running = max(self._max_running, step.num_running)

    def report(self) -> RolloutReport:
        """Sum what was counted so far."""

        def seconds(name: str) -> float:
            return float(self._sums.get(name, 0.0))

        def count(name: str) -> int:
            return int(self._sums.get(name, 0))

        return RolloutReport(
            seconds=seconds("seconds"),
            engine_s=seconds("seconds"),
            forward_s=seconds("forward_s"),
            sample_s=seconds("sample_s"),
            gap_s=seconds("gap_s"),
            draft_s=seconds("draft_s"),
            draft_forward_s=seconds("draft_forward_s"),
            tuner_s=seconds("tuner_s"),
            running_s=seconds("running_s"),
            num_steps=count("num_steps"),
            num_generated=count("num_generated"),
            num_computed=count("num_computed"),
            num_drafted=count("num_drafted"),
            num_accepted=count("num_accepted"),
            num_verified=count("num_verified"),
            max_running=self._max_running,
        )
