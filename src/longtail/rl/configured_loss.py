"""Finds the configured loss and advantage, by a paper's name or `module:function`."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from longtail.config.losses import ADVANTAGES, LOSSES, LossSpec
from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError, GradingError, describe
from longtail.rl.advantage import Rewards
from longtail.rl.grading.answers import checked_number
from longtail.rl.loss import LossInputs, LossOutput, LossSettings
from longtail.rl.packing import lay_out
from longtail.system.machine import named_callable
from longtail.types import MicroBatch, SamplingParams, TrainBatch

_EXAMPLE, _ALONE = ([1.0, 0.0], [0.5, 0.25, 0.0]), ([1.0], [0.0])
_DIFFER = "; groups differ in size where a completion is excluded"
_SUMS = ("clipped", "capped", "old_kl", "reference_kl")


def loss_of(own: LearnerSection) -> LossSpec:
    """Return the loss. Raises ConfigError for a path without one, as calls of one of yours do."""
    if own.loss in LOSSES:
        return LOSSES[own.loss]
    found: Any = named_callable(own.loss, "learner.loss", LossSpec)
    spec = found if isinstance(found, LossSpec) else LossSpec(found)
    return replace(
        spec,
        function=partial(_called, own.loss, spec.function, _check_output),
        normaliser=partial(_called, own.loss, spec.normaliser, _check_normaliser),
    )


def settings_of(own: LearnerSection) -> LossSettings:
    """Return the constants of the loss."""
    spec = loss_of(own)
    return LossSettings(
        clip_low=spec.clip_low if own.clip_low is None else own.clip_low,
        clip_high=spec.clip_high if own.clip_high is None else own.clip_high,
        kl_coef=own.kl_coef,
        tis_cap=own.tis_cap,
    )


def _called(name: str, function: Any, check: Any, *given: Any) -> Any:
    try:
        check(found := function(*given))
    except Exception as error:
        raise ConfigError(f"learner.loss = {name!r}: {describe(error)}") from error
    return found


def _check_output(output: Any) -> None:
    if not isinstance(output, LossOutput):
        raise ConfigError(f"it returned a {type(output).__name__}; return LossOutput(loss=...)")
    if unknown := output.sums.keys() - set(_SUMS):
        raise ConfigError(f"sums has {min(unknown)!r}; known are {', '.join(_SUMS)}")
    for name, value in [("loss", output.loss), *output.sums.items()]:
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{name} is {value!r:.80}; expected a detached scalar tensor")
        if value.shape:
            raise ConfigError(f"{name} has shape {tuple(value.shape)}; expected a scalar: .sum()")
    if not output.loss.requires_grad:
        raise ConfigError("loss does not depend on inputs.logprobs")


def _check_normaliser(found: object) -> None:
    if not (isinstance(found, int | float) and 0 < found < torch.inf):
        expected = "expected a positive number, as batch.num_sequences"
        raise ConfigError(f"normaliser of a batch returned {found!r:.80}; {expected}")


def advantages_of(own: LearnerSection, rewards: Rewards) -> list[list[float]]:
    """Return the advantages of groups. Raises ConfigError if they do not fit the rewards."""
    name, sizes = own.advantage or loss_of(own).advantage, [len(group) for group in rewards]
    function = ADVANTAGES.get(name) or named_callable(name, "learner.advantage")
    groups = f"groups of {' and '.join(map(str, sizes))} rewards"
    try:
        found = [list(group) for group in function([list(group) for group in rewards])]
        if (given := [len(group) for group in found]) != sizes:
            lengths = " and ".join(map(str, given))
            raise GradingError(f"for {groups} it returned {lengths} advantages")
        return [[checked_number(each, source="it") for each in group] for group in found]
    except Exception as error:
        failed = f"it failed on {groups}{_DIFFER * (len(set(sizes)) > 1)}: "
        why = describe(error) if isinstance(error, GradingError) else failed + describe(error)
        raise ConfigError(f"learner.advantage = {name!r}: {why}") from error


@cache  # before the run: a function that keeps a state sees no example later
def by_group(own: LearnerSection) -> bool:
    """Return whether a group's advantages need no other group: those of an example do not."""
    together = advantages_of(own, _EXAMPLE)
    return together == [each for group in _EXAMPLE for each in advantages_of(own, [group])]


def check(own: LearnerSection, group_size: int) -> None:
    """Call advantages and loss on an example. Raises ConfigError if nothing can be learned."""
    by_group(own)
    if group_size == 1 and (own.dynamic_sampling or advantages_of(own, _ALONE) == [[0.0], [0.0]]):
        reason = "dynamic_sampling" if own.dynamic_sampling else f"loss = {own.loss!r}"
        raise ConfigError(
            f"rollout.group_size = 1: learner.{reason} compares the completions of one prompt; "
            "use at least 2"
        )
    spec, packed = loss_of(own), lay_out([(0, 1, 2), (0, 1)], prompt_lens=[1, 1])
    rows, values = packed.loss_mask.nonzero()[:, 0], torch.tensor([0.0, -1.0, -0.5, 0.0, -2.0])
    advantages, logprobs = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0]), values[rows].requires_grad_()
    example = MicroBatch(name="", packed=packed, rollout_logprobs=values, advantages=advantages)
    counts = {"num_sequences": 2, "num_generated": 3}
    spec.normaliser(TrainBatch(micro_batches=(example,), sampling=SamplingParams(), **counts))
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=values[rows],
        rollout_logprobs=values[rows] * 1.01,
        reference_logprobs=values[rows] * 1.02 if own.kl_coef > 0 else None,
        advantages=advantages[rows],
        sequence=packed.sequence[rows],
        num_here=2,
    )
    loss = spec.function(inputs, settings_of(own)).loss

    def check_gradient(found: tuple[torch.Tensor]) -> None:
        if not (loss.isfinite() and found[0].isfinite().all() and found[0].any()):
            shown = f"{loss.item():g}, with the gradient {found[0].tolist()}"
            raise ConfigError(f"of an example it is {shown}; expected finite numbers, not all 0")

    _called(own.loss, torch.autograd.grad, check_gradient, loss, logprobs)
