"""The policy-gradient losses, each a pure function from a record to a record.

Rows are the generated tokens of one micro-batch. Symbols, used by every equation here:

    r_t = exp(logprob_t - old_logprob_t)       ratio of the policy to the one before the update
    A_t                                        advantage, the same for all tokens of a sequence
    w_t = min(exp(old_t - rollout_t), cap)     truncated importance weight, 1 without a cap
    surrogate(r, A) = min(r A, clip(r, 1 - low, 1 + high) A)                  PPO, equation 7
    kl_t = exp(ref_t - logprob_t) - (ref_t - logprob_t) - 1                   "k3" estimator

A token's term is  l_t = -w_t surrogate(r_t, A_t) + kl_coef kl_t.  The losses differ in the average
over terms, and in whether the ratio is a token's or a sequence's. A function returns the sum of a
micro-batch. The batch's loss L is the sum of these divided by the loss's normaliser, a number that
is known when the whole batch is: so groups can be learned from before the others are complete.

k3: Schulman 2020 (joschu.net/blog/kl-approx.html), unbiased under the policy's own samples, never
negative. w: Yao et al. 2025 ("truncated importance sampling"), for the gap between the rollout
engine's arithmetic and the learner's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest log-ratio, so that exp never overflows float32; there is no gradient beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Input of a loss: one row per generated token of a micro-batch.

    Example: two sequences that generated 2 and 1 tokens: sequence = (0, 0, 1), num_here = 2.
    """

    logprobs: Float[Tensor, "tokens"]
    """Log-probabilities under the policy being updated; the only input with a gradient."""
    old_logprobs: Float[Tensor, "tokens"]
    """Log-probabilities before this step's first update, computed by the learner."""
    rollout_logprobs: Float[Tensor, "tokens"]
    """Log-probabilities reported by the rollout engine."""
    reference_logprobs: Float[Tensor, "tokens"] | None
    """Log-probabilities under the initial policy; None without a KL term."""
    advantages: Float[Tensor, "tokens"]
    sequence: Int[Tensor, "tokens"]
    """Index, in this micro-batch, of the token's sequence."""
    num_here: int
    """Number of sequences in this micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Constants of a loss."""

    clip_low: float
    clip_high: float
    kl_coef: float = 0.0
    tis_cap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A micro-batch's loss before division by the normaliser, and sums for metrics."""

    loss: Float[Tensor, ""]
    sums: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    """Detached sums over tokens, any of these.

    `clipped`: tokens with a clipped surrogate, whose gradient is 0; `capped`: tokens whose
    importance weight (gspo, rloo: their sequence's) met its cap; `old_kl`, `reference_kl`: k3
    estimates of the KL from the policy before the update, and from the reference.
    """


def sequence_means(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Average over the tokens of each sequence, then over sequences.

    GRPO, Shao et al. 2024 (arXiv 2402.03300), equation 3:
    L = 1/num_sequences sum_i 1/|o_i| sum_t l_it
    """
    return _output(inputs, settings, average=_sequence_means)


def token_sum(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Sum over tokens, so that the weight of a token ignores length.

    dr_grpo: Liu et al. 2025 (arXiv 2503.20783), section 3.2, with their code's constant, the
    generation budget: L = 1/(num_sequences max_tokens) sum_i sum_t l_it

    dapo: Yu et al. 2025 (arXiv 2503.14476), equation 8: L = 1/num_generated sum_i sum_t l_it, with
    a wider clip range above than below. The paper averages over one prompt's group; here, as in its
    code, over the batch.

    reinforce_pp: Hu 2025 (arXiv 2501.03262), as dapo, with advantages normalised over the batch
    (`advantage.reinforce_pp`) and no critic.
    """
    return _output(inputs, settings)


def gspo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Clip whole sequences by their length-normalised ratio, then average over sequences.

    Zheng et al. 2025 (arXiv 2507.18071), equations 5 and 7:
    s_i = (pi(y_i) / pi_old(y_i)) ** (1/|y_i|),   L = -1/num_sequences sum_i w_i surrogate(s_i, A_i)
    The importance weight is length-normalised in the same way; KL is averaged as in grpo.
    """
    return _output(inputs, settings, combine=_sequence_means)


def rloo(inputs: LossInputs, settings: LossSettings) -> LossOutput:
    """Treat a whole completion as one action, with the leave-one-out baseline.

    Ahmadian et al. 2024 (arXiv 2402.14740), equation 8, with a clipped sequence ratio for updates
    after the first (as TRL does):
    s_i = pi(y_i) / pi_old(y_i),   L = -1/num_sequences sum_i w_i surrogate(s_i, A_i)
    On policy s_i = 1, nothing is clipped, and the gradient is REINFORCE's, A_i grad log pi(y_i).
    KL and log w are also summed over the tokens of a sequence.
    """
    return _output(inputs, settings, combine=_sequence_sums)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _kl(inputs: LossInputs) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) per token; 0 without a reference."""
    if inputs.reference_logprobs is None:
        return torch.zeros_like(inputs.logprobs)
    gap = inputs.reference_logprobs - inputs.logprobs
    return _exp(gap) - gap - 1


def _sequence_sums(values: Float[Tensor, "tokens"], inputs: LossInputs) -> Tensor:
    return values.new_zeros(inputs.num_here).index_add(0, inputs.sequence, values)


def _sequence_means(values: Float[Tensor, "tokens"], inputs: LossInputs) -> Tensor:
    """Return the mean over the tokens of each sequence; 0 for a sequence without tokens."""
    lengths = torch.bincount(inputs.sequence, minlength=inputs.num_here)
    return _sequence_sums(values, inputs) / lengths.clamp(min=1)


def _output(
    inputs: LossInputs,
    settings: LossSettings,
    *,
    combine: Callable[[Tensor, LossInputs], Tensor] | None = None,
    average: Callable[[Tensor, LossInputs], Tensor] | None = None,
) -> LossOutput:
    """Return the sum of the terms -w surrogate(r, A) + kl_coef kl.

    With `combine`, which makes one value of those of a sequence's tokens, there is a term for each
    sequence, else for each token; `average` takes terms of tokens before the sum.
    """
    log_ratio, kl = inputs.logprobs - inputs.old_logprobs, _kl(inputs)
    gap, advantages = inputs.old_logprobs - inputs.rollout_logprobs, inputs.advantages
    ratio, tokens = _exp(log_ratio), torch.arange(len(kl), device=kl.device)
    if combine is not None:
        ratio, gap, kl = _exp(combine(log_ratio, inputs)), combine(gap, inputs), combine(kl, inputs)
        advantages, tokens = _sequence_means(advantages, inputs), inputs.sequence
    plain = ratio * advantages
    limited = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantages
    terms, capped = -torch.minimum(plain, limited), torch.zeros_like(ratio)
    if settings.tis_cap is not None:
        weight = _exp(gap.detach())
        terms = weight.clamp(max=settings.tis_cap) * terms
        capped = (weight > settings.tis_cap).to(ratio.dtype)
    terms = terms + settings.kl_coef * kl
    with torch.no_grad():
        sums = {
            "clipped": (limited < plain).to(ratio.dtype)[tokens].sum(),
            "capped": capped[tokens].sum(),
            "old_kl": (_exp(log_ratio) - log_ratio - 1).sum(),
            "reference_kl": _kl(inputs).sum(),
        }
    return LossOutput(loss=(terms if average is None else average(terms, inputs)).sum(), sums=sums)
