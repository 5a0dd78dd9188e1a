"""What a rollout cost and where its time went, counted step by step."""

from dataclasses import dataclass, field

from longtail.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """One token as it is drawn, for those who stream."""

    request_id: str
    token: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One engine step.

    Example: StepReport(num_tokens=9, num_running=9, step_s=0.004, forward_s=0.0035,
                        sample_s=0.0002, emitted=(...), finished=())
    """

    num_tokens: int
    """Flat tokens computed."""
    num_running: int
    step_s: float
    forward_s: float
    """Decoder and LM head."""
    sample_s: float
    emitted: tuple[Emitted, ...]
    finished: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """A whole rollout phase."""

    seconds: float
    forward_s: float
    sample_s: float
    num_steps: int
    num_generated: int
    num_computed: int
    """Flat tokens computed: generated ones, prompts, and recomputation after preemption."""
    max_running: int
    """Most requests that ran at one time."""
    running_s: float
    """Request-seconds: running requests summed over time."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second."""
        return self.num_generated / self.seconds if self.seconds else 0.0

    @property
    def bookkeeping_share(self) -> float:
        """Share of the time outside the forward passes and the sampler."""
        return 1 - (self.forward_s + self.sample_s) / self.seconds if self.seconds else 0.0

    @property
    def tail_idle_share(self) -> float:
        """Share of the engine's places that stood empty while the longest completions went on."""
        capacity = self.max_running * self.seconds
        return 1 - self.running_s / capacity if capacity else 0.0


@dataclass(slots=True)
class RolloutMeter:
    """Sums step reports into a rollout report."""

    _steps: list[tuple[float, float, float, int, int, int]] = field(default_factory=list)

    def add(self, step: StepReport) -> None:
        """Count one step."""
        self._steps.append(
            (
                step.step_s,
                step.forward_s,
                step.sample_s,
                step.num_running,
                step.num_tokens,
                len(step.emitted),
            )
        )

    def report(self) -> RolloutReport:
        """Sum what was counted so far."""
        return RolloutReport(
            seconds=sum((s[0] for s in self._steps), 0.0),
            forward_s=sum((s[1] for s in self._steps), 0.0),
            sample_s=sum((s[2] for s in self._steps), 0.0),
            num_steps=len(self._steps),
            num_generated=sum(s[5] for s in self._steps),
            num_computed=sum(s[4] for s in self._steps),
            max_running=max((s[3] for s in self._steps), default=0),
            running_s=sum((s[0] * s[3] for s in self._steps), 0.0),
        )
