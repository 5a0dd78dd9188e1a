"""Metrics of a learner step: sums over its micro-batches, and the report made from them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from longtail.rl.collectives import ProcessGroup
from longtail.rl.logprobs import TokenScores
from longtail.rl.loss import LossInputs, LossOutput
from longtail.types import TrainBatch

Section = Literal["logprob", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    """Report of one step. Means are over scored tokens, or over updates if there are several.

    The rollout gap compares the learner's logprobs before the update with the rollout engine's.
    All ranks of a process group report the same values, of the whole batch, except for seconds.
    """

    step: int
    version: int
    """Version of the weights after this step."""
    num_updates: int
    num_tokens: int
    """Number of scored sequences' tokens, prompts included."""
    num_generated: int
    num_scored: int
    """Number of generated tokens that were computed; the others have advantage 0."""
    loss: float
    grad_norm: float
    """Global gradient norm before clipping."""
    learning_rate: float
    entropy: float
    clip_fraction: float
    old_kl: float
    """KL from the policy before this step, at each update's forward pass (k3 estimate)."""
    reference_kl: float
    capped_fraction: float
    """Share of tokens whose importance weight (gspo, rloo: their sequence's) met its cap."""
    gap_mean: float
    """Mean of |learner - rollout| logprob."""
    gap_max: float
    rollout_ratio_mean: float
    """Mean of p(learner) / p(rollout); 1 if the two agree."""
    rollout_ratio_min: float
    rollout_ratio_max: float
    logprob_seconds: float
    """Seconds of forward passes of the policy, before and during updates, and of the reference."""
    backward_seconds: float
    """Seconds of backward passes."""
    update_seconds: float
    """Seconds of backward passes, reductions and optimizer updates."""

    @property
    def metrics(self) -> dict[str, float]:
        """Values for the metrics file, by verl's name if it has one."""
        return {
            "actor/loss": self.loss,
            "actor/nonzero_advantage_share": self.num_scored / max(self.num_generated, 1),
            "actor/grad_norm": self.grad_norm,
            "actor/lr": self.learning_rate,
            "actor/entropy": self.entropy,
            "actor/pg_clipfrac": self.clip_fraction,
            "actor/ppo_kl": self.old_kl,
            "actor/kl_loss": self.reference_kl,
            "training/rollout_logprob_gap_mean": self.gap_mean,
            "training/rollout_logprob_gap_max": self.gap_max,
            "training/rollout_ratio_mean": self.rollout_ratio_mean,
            "training/rollout_ratio_min": self.rollout_ratio_min,
            "training/rollout_ratio_max": self.rollout_ratio_max,
            "training/importance_capped": self.capped_fraction,
        }


@dataclass(slots=True, kw_only=True)
class LearnerMetrics:
    """Sums over the micro-batches of a step, as plain floats."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    old_kl: float = 0.0
    reference_kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    ratio: float = 0.0
    ratio_min: float = float("inf")
    ratio_max: float = 0.0
    num_scored: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    seconds: dict[Section, float] = field(
        default_factory=lambda: dict.fromkeys(get_args(Section), 0.0)
    )

    def add(self, inputs: LossInputs, output: LossOutput, scores: TokenScores) -> None:
        """Count one micro-batch."""
        self.num_scored += len(scores.rows)
        self.loss += output.loss.item()
        self.entropy += scores.entropy.sum().item()
        self.clipped += output.sums.clipped.item()
        self.capped += output.sums.capped.item()
        self.old_kl += output.sums.old_kl.item()
        self.reference_kl += output.sums.reference_kl.item()
        if len(scores.rows) == 0:
            return
        gap = inputs.old_logprobs - inputs.rollout_logprobs
        ratio = gap.exp()
        self.gap += gap.abs().sum().item()
        self.gap_max = max(self.gap_max, gap.abs().max().item())
        self.ratio += ratio.sum().item()
        self.ratio_min = min(self.ratio_min, ratio.min().item())
        self.ratio_max = max(self.ratio_max, ratio.max().item())

    @contextmanager
    def timed(self, section: Section, device: torch.device) -> Iterator[None]:
        """Add the seconds until the device has finished its work to `section`."""
        start = _now(device)
        yield
        self.seconds[section] += _now(device) - start

    def all_reduce(self, group: ProcessGroup) -> None:
        """Combine the metrics of all ranks: counts are summed, extremes are of all ranks.

        Seconds become the slowest rank's. Gradient norms and the rate are the same on all ranks.
        """
        sums = [self.loss, self.entropy, self.clipped, self.capped]
        sums += [self.old_kl, self.reference_kl, self.gap, self.ratio, self.num_scored]
        most = [self.gap_max, self.ratio_max, -self.ratio_min]
        most += self.seconds.values()
        rows = torch.zeros(group.size, len(sums) + len(most), dtype=torch.float64)
        rows[group.rank] = torch.tensor([*sums, *most], dtype=torch.float64)
        group.all_reduce([rows])  # the other rows are zeros here, so this gathers all rows
        sums, most = rows[:, : len(sums)].sum(0).tolist(), rows[:, len(sums) :].amax(0).tolist()
        self.loss, self.entropy, self.clipped, self.capped = sums[:4]
        self.old_kl, self.reference_kl, self.gap, self.ratio, self.num_scored = sums[4:]
        self.gap_max, self.ratio_max, self.ratio_min = most[0], most[1], -most[2]
        self.seconds = dict(zip(self.seconds, most[3:], strict=True))

    def report(self, version: int, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Return the means; a step without scored tokens reports zeros and a ratio of 1."""
        generated = sum(batch.num_generated for batch in batches)
        updates, scored = max(len(batches), 1), int(self.num_scored)
        tokens = max(scored, 1)
        return LearnerReport(
            step=version - 1,
            version=version,
            num_updates=len(batches),
            num_tokens=sum(m.packed.num_tokens for b in batches for m in b.micro_batches),
            num_generated=generated,
            num_scored=scored,
            loss=self.loss / updates,
            grad_norm=sum(self.grad_norms) / updates,
            learning_rate=self.learning_rate,
            entropy=self.entropy / tokens,
            clip_fraction=self.clipped / tokens,
            old_kl=self.old_kl / tokens,
            reference_kl=self.reference_kl / tokens,
            capped_fraction=self.capped / tokens,
            gap_mean=self.gap / tokens,
            gap_max=self.gap_max,
            rollout_ratio_mean=self.ratio / tokens if scored else 1.0,
            rollout_ratio_min=self.ratio_min if scored else 1.0,
            rollout_ratio_max=self.ratio_max if scored else 1.0,
            logprob_seconds=self.seconds["logprob"],
            backward_seconds=self.seconds["backward"],
            update_seconds=self.seconds["backward"] + self.seconds["update"],
        )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
