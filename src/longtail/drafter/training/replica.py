"""Replicas: drafters that workers trained from the published one, and their average."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.weights import are_finite, weighted_mean
from longtail.rl.muon import MuonOptimizer
from longtail.rl.optim import Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A drafter trained from a published one, and the measurements of both on the same texts.

    Example: Replica(base_version=3, weights=trainer.weights(), num_tokens=16_000, num_steps=8,
                     accept_len=2.61, base_accept_len=2.44), whose gain is 0.07
    """

    base_version: int
    weights: Mapping[str, Tensor]
    num_tokens: int
    """Tokens trained since the base, repeats included."""
    num_steps: int
    accept_len: float
    """Expected accept length of a chain of the measured depths; NaN without held-out text."""
    base_accept_len: float

    @property
    def gain(self) -> float:
        """Relative rise of the expected accept length; NaN if unmeasured."""
        return self.accept_len / self.base_accept_len - 1.0


class SpotEnd(StrEnum):
    """Reason why an interval of spot training ended."""

    STOPPED = "stopped"
    """The caller stopped it."""
    NO_TEXTS = "no texts"
    """The buffer had no text to train on."""
    NO_GAIN = "no gain"
    """The measurements no longer rose."""
    NOT_FINITE = "not finite"
    """A NaN or infinity occurred; the replica was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """Work and result of an interval of spot training.

    Example: SpotReport(num_steps=41, num_tokens=80_000, num_reused=60_000, seconds=9.7,
                        max_micro_step_s=0.06, reason=SpotEnd.STOPPED, replica=replica)
    """

    num_steps: int
    num_tokens: int
    """Tokens trained."""
    num_reused: int
    """Number of these whose features an engine had kept; the others were computed again."""
    seconds: float
    max_micro_step_s: float
    """Longest time between two checks for a stop."""
    reason: SpotEnd
    replica: Replica | None
    """Best replica measured in this interval."""


def merge(replicas: Sequence[Replica]) -> dict[str, Tensor]:
    """Average replicas of one base, weighted by their trained tokens (local SGD).

    Only replicas of the newest base count; those that are not finite or untrained are left out, and
    one must be left. Equal replicas keep every bit. Stich 2018 (arXiv 1805.09767) bounds the cost
    of averaging while replicas stay close.
    """
    newest = max(replica.base_version for replica in replicas)
    kept = [
        replica
        for replica in replicas
        if replica.base_version == newest and replica.num_tokens and are_finite(replica.weights)
    ]
    assert kept, "no replica is left to merge"
    return weighted_mean([each.weights for each in kept], [each.num_tokens for each in kept])


def make_optimizer(
    layer: EagleLayer,
    settings: OptimizerSection,
    matrix_rate: float | None,
    total_steps: int = 0,
) -> Optimizer | MuonOptimizer:
    """Return Muon for the matrices at `matrix_rate`; AdamW for all parameters if it is None."""
    if matrix_rate is None:
        return Optimizer(layer.named_parameters(), settings, total_steps=total_steps)
    module = nn.ModuleDict({"layers": nn.ModuleList([layer])})  # Muon applies inside `layers`
    return MuonOptimizer(module, settings, matrix_rate=matrix_rate, total_steps=total_steps)
