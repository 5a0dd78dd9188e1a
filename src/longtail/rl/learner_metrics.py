"""Metrics of a learner step: one row per micro-batch, and the report made from all rows.

Sums are rounded once (`math.fsum`), so they do not depend on which rank computed which row.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields
from typing import Literal, get_args

import torch

from longtail.rl.collectives import ProcessGroup
from longtail.rl.logprobs import TokenScores
from longtail.rl.loss import LossInputs, LossOutput
from longtail.system.device import now
from longtail.types import TrainBatch

Section = Literal["logprob", "backward", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerReport:
    """Report of one step.

    All ranks of a process group report the same values, of the whole batch, except for seconds
    and bytes.
    """

    version: int
    """Version of the weights after this step."""
    metrics: Mapping[str, float]
    """Values for the metrics file, by verl's name if it has one.

    Means are over scored tokens, or over updates if there are several. The rollout gap compares the
    learner's logprobs before the update with the rollout engine's.
    """
    seconds: Mapping[str, float]
    """Seconds of forward passes of policy and reference (`logprob`), of backward passes, and of
    these with reductions and optimizer updates (`update`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRow:
    """Metrics of one micro-batch, sums over its tokens but for the extremes; plain floats."""

    loss: float
    entropy: float
    num_scored: float
    clipped: float = 0.0
    capped: float = 0.0
    old_kl: float = 0.0
    reference_kl: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    ratio: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = 0.0
    largest: float = 0.0
    """Largest magnitude in the gradient; infinity if it is not finite."""
    where: float = 0.0
    """Number of the parameter that has it."""

    @classmethod
    def of(cls, inputs: LossInputs, output: LossOutput, scores: TokenScores) -> "MetricsRow":
        """Return the metrics of a forward pass."""
        gap = inputs.old_logprobs - inputs.rollout_logprobs
        ratio, sums = gap.exp(), {**output.sums, "entropy": scores.entropy.sum()}
        if len(gap):
            sums |= {
                "gap": gap.abs().sum(),
                "gap_max": gap.abs().max(),
                "ratio": ratio.sum(),
                "ratio_min": ratio.min(),
                "ratio_max": ratio.max(),
            }
        return cls(
            loss=output.loss.item(),
            num_scored=float(len(gap)),
            **{name: value.item() for name, value in sums.items()},
        )


_NAMES = tuple(each.name for each in fields(MetricsRow))


@dataclass(slots=True, kw_only=True)
class LearnerMetrics:
    """Rows of a step, with what it has once an update."""

    rows: list[MetricsRow] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rate: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(get_args(Section), 0.0))

    @contextmanager
    def timed(self, section: Section, device: torch.device) -> Iterator[None]:
        """Add the seconds until the device has finished its work to `section`."""
        start = now(device)
        yield
        self.seconds[section] += now(device) - start

    def gather(
        self, group: ProcessGroup, names: Sequence[str], own: Mapping[str, MetricsRow]
    ) -> list[MetricsRow]:
        """Return the rows of these micro-batches, each from the rank that computed it.

        Seconds become the slowest rank's.
        """
        seconds = group.gather(list(self.seconds.values())).amax(0).tolist()
        self.seconds = dict(zip(self.seconds, seconds, strict=True))
        # Numbers are zeros on all other ranks, so a sum gathers them.
        table = torch.zeros(len(names), len(_NAMES), dtype=torch.float64)
        for index, name in enumerate(names):
            if name in own:
                table[index] = torch.tensor(astuple(own[name]), dtype=torch.float64)
        group.all_reduce([table])
        return [MetricsRow(**dict(zip(_NAMES, row, strict=True))) for row in table.tolist()]

    def add(self, rows: Sequence[MetricsRow], normaliser: int | float) -> None:
        """Count the rows of an update."""
        self.rows += rows
        self.losses.append(math.fsum(row.loss for row in rows) / normaliser)

    def report(self, version: int, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Return the means; a step without scored tokens reports zeros and a ratio of 1."""
        columns = zip(*map(astuple, self.rows), strict=True)
        values = dict(zip(_NAMES, columns, strict=True)) if self.rows else {}
        total = {name: math.fsum(values.get(name, ())) for name in _NAMES}
        updates, scored = max(len(batches), 1), int(total["num_scored"])
        mean = {name: value / max(scored, 1) for name, value in total.items()}
        num_generated = sum(batch.num_generated for batch in batches)
        metrics = {
            "actor/loss": sum(self.losses) / updates,
            "actor/nonzero_advantage_share": scored / max(num_generated, 1),
            "actor/grad_norm": sum(self.grad_norms) / updates,  # before clipping
            "actor/lr": self.learning_rate,
            "actor/entropy": mean["entropy"],
            "actor/pg_clipfrac": mean["clipped"],
            "actor/ppo_kl": mean["old_kl"],
            "actor/kl_loss": mean["reference_kl"],
            "training/rollout_logprob_gap_mean": mean["gap"],
            "training/rollout_logprob_gap_max": max(values.get("gap_max", (0.0,))),
            "training/rollout_ratio_mean": mean["ratio"] if scored else 1.0,
            "training/rollout_ratio_min": min(values["ratio_min"]) if scored else 1.0,
            "training/rollout_ratio_max": max(values["ratio_max"]) if scored else 1.0,
            "training/importance_capped": mean["capped"],
        }
        return LearnerReport(
            version=version,
            metrics=metrics,
            seconds={**self.seconds, "update": self.seconds["backward"] + self.seconds["update"]},
        )
