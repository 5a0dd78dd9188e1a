"""The loss and the advantages of a run, by the names of papers or by a path `module:function`."""

import math
from typing import Any

import torch

from longtail.config.losses import ADVANTAGES, LOSSES, LossSpec
from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError, describe
from longtail.rl.advantage import Rewards
from longtail.rl.grading.answers import checked_number
from longtail.rl.learner_metrics import MetricsRow
from longtail.rl.logprobs import TokenScores
from longtail.rl.loss import LossInputs, LossSettings
from longtail.system.machine import named_callable

_EXAMPLE, _ALONE = ([1.0, 0.0], [0.5, 0.25, 0.0]), ([1.0], [0.0])


def loss_of(own: LearnerSection) -> LossSpec:
    """Return the loss. Raises ConfigError for a path without one."""
    found: Any = LOSSES.get(own.loss) or named_callable(own.loss, "learner.loss", LossSpec)
    return found if isinstance(found, LossSpec) else LossSpec(found)


def advantages_of(own: LearnerSection, rewards: Rewards) -> list[list[float]]:
    """Return the advantages of groups. Raises ConfigError if they do not fit the rewards."""
    name, field = own.advantage or loss_of(own).advantage, "learner.advantage"
    function = ADVANTAGES.get(name) or named_callable(name, field)
    try:
        return [
            [checked_number(value, source="it") for value, _ in zip(*group, strict=True)]
            for group in zip(function(rewards), rewards, strict=True)
        ]
    except Exception as error:
        raise ConfigError(
            f"{field} = {name!r}: {describe(error)}; expected a function from the rewards of each "
            "group to as many advantages"
        ) from error


def by_group(own: LearnerSection) -> bool:
    """Return whether a group's advantages need no other group: those of an example do not."""
    alone = [advantage for group in _EXAMPLE for advantage in advantages_of(own, [group])]
    return advantages_of(own, _EXAMPLE) == alone


def check(own: LearnerSection, group_size: int) -> None:
    """Call advantages and loss on an example. Raises ConfigError if nothing can be learned."""
    by_group(own)
    if group_size == 1 and (own.dynamic_sampling or advantages_of(own, _ALONE) == [[0.0], [0.0]]):
        reason = "dynamic_sampling" if own.dynamic_sampling else f"loss = {own.loss!r}"
        raise ConfigError(
            f"rollout.group_size = 1: learner.{reason} compares the completions of one prompt; "
            "use at least 2"
        )
    ones, sequence = torch.ones(2, requires_grad=True), torch.tensor([0, 0])
    columns = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages")
    example: dict[str, Any] = dict.fromkeys(columns, ones)
    inputs = LossInputs(**example, sequence=sequence, num_here=1)
    loss, settings = loss_of(own), LossSettings(clip_low=0.2, clip_high=0.2, kl_coef=own.kl_coef)
    try:
        output = loss.function(inputs, settings)
        scores = TokenScores(rows=sequence, logprobs=ones, entropy=ones)
        value = MetricsRow.of(inputs, output, scores).loss
        (gradient,) = torch.autograd.grad(output.loss, ones)
        if not (math.isfinite(value) and gradient.isfinite().all()):
            raise ConfigError(f"of an example it is {value}, with the gradient {gradient.tolist()}")
    except Exception as error:
        raise ConfigError(
            f"learner.loss = {own.loss!r}: {describe(error)}; expected a function from LossInputs "
            "and LossSettings to a LossOutput with one finite number (longtail.rl.loss)"
        ) from error
