"""What passes between workers and who keeps them at work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longtail.drafter.eagle.weights import DrafterWeights
from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.rl.data.examples import Example
from longtail.rl.learner import LearnerState
from longtail.types import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a worker's task is; counts are of the present rollout.

    Example: Progress(beats=812, num_finished=30, num_generated=9120, num_running=34, drafts=True)
    """

    beats: int = 0
    """Engine steps and micro-batches since the worker began: while it works, they rise."""
    num_finished: int = 0
    num_generated: int = 0
    num_running: int = 0
    drafts: bool | None = None
    """Whether the last step drafted; None if the engine never does."""
    is_waiting: bool = False
    """It has done its share, and makes no step before others have done theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of a worker's share of a rollout."""

    completions: tuple[Completion, ...]
    report: RolloutReport
    series: RolloutSeries | None
    costs: Mapping[str, Any] | None
    """What steps cost, as JSON holds it."""
    known_costs: Mapping[str, Any] | None
    """What they were thought to cost before the worker's first rollout; None of later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafter weights on their way to those who draft, and texts to see how they do.

    Example: Offer(weights=weights, digest=weights.digest, texts=texts)
    """

    weights: DrafterWeights
    digest: str
    texts: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of drafter weights that were offered.

    Example: Verdict(version=4, is_adopted=True, before=2.31, after=2.52)
    """

    version: int
    is_adopted: bool
    before: float
    """Expected accept length of what was served; nan where there was no text to tell."""
    after: float
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The policy in the middle of a run: its weights and what its next update depends on."""

    weights: Mapping[str, Tensor]
    learner: LearnerState
