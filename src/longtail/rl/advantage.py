"""Advantages from rewards.

Every estimator maps the rewards of each group (the completions of one prompt) to advantages of the
same shape. A group is shorter if gradings failed. No tensors are used.

NOTE: the group-relative estimators give a group of one the advantage 0: a failed grading must never
turn a reward without a baseline into a gradient.
"""

import math
from collections.abc import Sequence

from longtail.types import Group

Rewards = Sequence[Sequence[float]]
"""Rewards of each group."""

EPSILON = 1e-6
"""Number added to a standard deviation before division, as in verl."""


def grpo(rewards: Rewards) -> list[list[float]]:
    """Normalise within each group: (r - mean) / (std + eps).

    GRPO, Shao et al. 2024 (arXiv 2402.03300), section 4.1.2; also DAPO's equation 9 and GSPO's
    equation 6. The standard deviation divides by n - 1, as in TRL and verl.

    Example: [[1, 0, 0, 1]] -> [[0.87, -0.87, -0.87, 0.87]]
    """
    return [_normalised(group) for group in rewards]


def dr_grpo(rewards: Rewards) -> list[list[float]]:
    """Subtract the group's mean: r - mean.

    Dr. GRPO, Liu et al. 2025 (arXiv 2503.20783), section 3.2: dividing by std would favour prompts
    that are nearly always solved or nearly never.

    Example: [[1, 0, 0, 1]] -> [[0.5, -0.5, -0.5, 0.5]]
    """
    return [_centred(group) for group in rewards]


def rloo(rewards: Rewards) -> list[list[float]]:
    """Subtract the mean of the *other* rewards of the group: (r - mean) n / (n - 1).

    RLOO, Ahmadian et al. 2024 (arXiv 2402.14740), equation 8. The baseline is independent of the
    completion it is subtracted from, so the gradient is unbiased.

    Example: [[1, 0, 0, 1]] -> [[0.67, -0.67, -0.67, 0.67]]
    """
    return [
        [value * len(group) / max(len(group) - 1, 1) for value in _centred(group)]
        for group in rewards
    ]


def reinforce_pp(rewards: Rewards) -> list[list[float]]:
    """Normalise over the whole batch, ignoring groups: (r - mean) / (std + eps).

    REINFORCE++, Hu 2025 (arXiv 2501.03262), the global advantage normalisation. The paper's return
    is the final reward less a discounted sum of per-token KL; here KL is a term of the loss
    (`kl_coef`), so the return of every token is the reward. A batch of one gets 0.

    Example: [[1, 1], [0, 0]] -> [[0.87, 0.87], [-0.87, -0.87]]
    """
    flat = iter(_normalised([reward for group in rewards for reward in group]))
    return [[next(flat) for _ in group] for group in rewards]


def keep_informative(groups: Sequence[Group]) -> list[Group]:
    """Leave out groups with equal rewards, whose advantages are 0, and groups of fewer than two.

    DAPO's dynamic sampling, Yu et al. 2025 (arXiv 2503.14476), equation 11; `refill_size` is the
    other half of it.
    """
    return [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1]


def refill_size(*, wanted: int, informative: int, sampled: int) -> int:
    """Return the number of further prompts to sample for a batch of `wanted` informative groups.

    It expects the same share of informative groups as among the `sampled` prompts so far, and is
    at most `wanted`; 0 if the batch is full.

    Example: 16 wanted, 12 of 16 informative: 4 are missing, 6 prompts give 4.5 in the mean
    """
    missing = max(wanted - informative, 0)
    return min(-(-missing * sampled // max(informative, 1)), wanted)


def overlong_penalty(length: int, *, max_tokens: int, buffer: int) -> float:
    """Return the soft length penalty of a completion, in [-1, 0], which is added to its reward.

    DAPO, equation 13: 0 up to max_tokens - buffer tokens, then linear to -1 at max_tokens. With a
    buffer of 0 the penalty is 0.

    Example: max_tokens=100, buffer=20: lengths 80, 85, 100 -> 0, -0.25, -1
    """
    if buffer <= 0:
        return 0.0
    return -min(1.0, max(0.0, (length - (max_tokens - buffer)) / buffer))


def shaped_rewards(groups: Sequence[Group], *, max_tokens: int, buffer: int) -> list[list[float]]:
    """Return the rewards of each group with the overlong penalty added."""
    return [
        [
            rollout.reward
            + overlong_penalty(
                rollout.completion.num_generated, max_tokens=max_tokens, buffer=buffer
            )
            for rollout in group.rollouts
        ]
        for group in groups
    ]


def _centred(values: Sequence[float]) -> list[float]:
    """Subtract the mean; the result is exactly 0 if all values are equal, despite rounding."""
    if len(set(values)) <= 1:
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    return [value - mean for value in values]


def _normalised(values: Sequence[float]) -> list[float]:
    centred = _centred(values)
    variance = math.fsum(value * value for value in centred) / max(len(values) - 1, 1)
    return [value / (math.sqrt(variance) + EPSILON) for value in centred]
