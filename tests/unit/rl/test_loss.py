"""Every loss against arithmetic on plain floats, value and gradient.

The worked example is two sequences of a batch of three: the first generated tokens 0 and 1 and was
better than its group, the second generated token 2 and was worse. Under the usual clipping (0.2)
token 0 is free, token 1 went up too far and token 2 down too far.
"""

from dataclasses import replace
from math import exp

import pytest
import torch

from longtail.config.losses import LOSSES
from longtail.rl.loss import LossInputs, LossOutput, LossSettings
from longtail.types import SamplingParams, TrainBatch

NOW = (-1.0, -0.5, -2.0)
OLD = (-1.1, -0.9, -1.6)
ROLLOUT = (-1.3, -0.8, -1.9)
REFERENCE = (-0.9, -0.7, -2.2)
BETTER, WORSE = 1.0, -0.5
SEQUENCES, TOKENS, BUDGET = 3, 5, 4  # of the whole batch; the rest of it is in another micro-batch
BATCH = TrainBatch(
    micro_batches=(),
    sampling=SamplingParams(max_tokens=BUDGET),
    num_sequences=SEQUENCES,
    num_generated=TOKENS,
)

R0, R1, R2 = exp(0.1), exp(0.4), exp(-0.4)  # ratios new / old of the three tokens
KL = [exp(ref - now) - (ref - now) - 1 for ref, now in zip(REFERENCE, NOW, strict=True)]
KL_SLOPE = [1 - exp(ref - now) for ref, now in zip(REFERENCE, NOW, strict=True)]


def inputs(**changes) -> LossInputs:
    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    example = LossInputs(
        logprobs=tensor(*NOW).requires_grad_(),
        old_logprobs=tensor(*OLD),
        rollout_logprobs=tensor(*ROLLOUT),
        reference_logprobs=None,
        advantages=tensor(BETTER, BETTER, WORSE),
        sequence=torch.tensor([0, 0, 1]),
        num_here=2,
    )
    return replace(example, **changes)


def settings(name: str, **changes) -> LossSettings:
    spec = LOSSES[name]
    constants = LossSettings(clip_low=spec.clip_low, clip_high=spec.clip_high)
    return replace(constants, **changes)


def run(name: str, given: LossInputs, **changes) -> LossOutput:
    """Return the micro-batch's part of the batch's loss."""
    spec = LOSSES[name]
    output = spec.function(given, settings(name, **changes))
    return replace(output, loss=output.loss / spec.normaliser(BATCH))


def gradient(output: LossOutput, given: LossInputs) -> list[float]:
    return torch.autograd.grad(output.loss, given.logprobs)[0].tolist()


# Token losses: token 0 is free (R0 A), token 1 is held at the upper clip, token 2 at the lower.
FREE, HELD_UP, HELD_DOWN = -R0 * BETTER, -1.2 * BETTER, -0.8 * WORSE
# Sequence losses within wide clips: ratios of whole sequences, exp(0.1 + 0.4) and exp(-0.4), or
# their geometric means.
WIDE = {"clip_low": 0.9, "clip_high": 9.0}
WHOLE, MEAN, DOWN = -exp(0.5) * BETTER, -exp(0.25) * BETTER, -R2 * WORSE
# old - rollout = 0.2, -0.1, 0.3: weights 1.2214, 0.9048, 1.3499 of tokens, exp(0.1) and exp(0.3) of
# sequences, exp(0.05) and exp(0.3) of geometric means; the cap is 1.21.
CAP = 1.21
CASES = {
    # The loss, its slopes by logprob, and how many tokens are clipped and weights capped.
    "grpo": (
        {},
        ((FREE + HELD_UP) / 2 + HELD_DOWN) / SEQUENCES,
        (FREE / 2 / SEQUENCES, 0, 0),
        (2, 0),
    ),
    "dr_grpo": (
        {},
        (FREE + HELD_UP + HELD_DOWN) / (SEQUENCES * BUDGET),
        (FREE / (SEQUENCES * BUDGET), 0, 0),
        (2, 0),
    ),
    "dapo": ({}, (FREE - 1.28 * BETTER + HELD_DOWN) / TOKENS, (FREE / TOKENS, 0, 0), (2, 0)),
    "reinforce_pp": ({}, (FREE + HELD_UP + HELD_DOWN) / TOKENS, (FREE / TOKENS, 0, 0), (2, 0)),
    "gspo": ({}, -(1.0004 * BETTER + (1 - 3e-4) * WORSE) / SEQUENCES, (0, 0, 0), (3, 0)),
    "gspo, not clipped": (
        WIDE,
        (MEAN + DOWN) / SEQUENCES,
        (MEAN / 2 / SEQUENCES, MEAN / 2 / SEQUENCES, DOWN / SEQUENCES),
        (0, 0),
    ),
    "rloo, not clipped": (
        WIDE,
        (WHOLE + DOWN) / SEQUENCES,
        (WHOLE / SEQUENCES, WHOLE / SEQUENCES, DOWN / SEQUENCES),
        (0, 0),
    ),
    "dapo, weighted": (
        {"tis_cap": CAP},
        (CAP * FREE - exp(-0.1) * 1.28 * BETTER + CAP * HELD_DOWN) / TOKENS,
        (CAP * FREE / TOKENS, 0, 0),
        (2, 2),
    ),
    "rloo, weighted": (
        {**WIDE, "tis_cap": CAP},
        (exp(0.1) * WHOLE + CAP * DOWN) / SEQUENCES,
        (exp(0.1) * WHOLE / SEQUENCES, exp(0.1) * WHOLE / SEQUENCES, CAP * DOWN / SEQUENCES),
        (0, 1),
    ),
    "gspo, weighted": (
        {**WIDE, "tis_cap": CAP},
        (exp(0.05) * MEAN + CAP * DOWN) / SEQUENCES,
        (exp(0.05) * MEAN / 2 / SEQUENCES,) * 2 + (CAP * DOWN / SEQUENCES,),
        (0, 1),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loss_is_the_sum_written_out(case):
    changes, loss, slopes, counts = CASES[case]
    given = inputs()
    output = run(case.partition(",")[0], given, **changes)
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    assert gradient(output, given) == pytest.approx(slopes, rel=1e-12)
    assert (output.sums["clipped"].item(), output.sums["capped"].item()) == counts
    log_ratios = [now - old for now, old in zip(NOW, OLD, strict=True)]
    old_kl = sum(exp(x) - x - 1 for x in log_ratios)
    assert output.sums["old_kl"].item() == pytest.approx(old_kl, rel=1e-12)


KL_WEIGHTS = {
    # How the loss averages one token of sequence 0 and of sequence 1.
    "grpo": (1 / 2 / SEQUENCES, 1 / SEQUENCES),
    "dr_grpo": (1 / (SEQUENCES * BUDGET), 1 / (SEQUENCES * BUDGET)),
    "dapo": (1 / TOKENS, 1 / TOKENS),
    "gspo": (1 / 2 / SEQUENCES, 1 / SEQUENCES),
    "rloo": (1 / SEQUENCES, 1 / SEQUENCES),
    "reinforce_pp": (1 / TOKENS, 1 / TOKENS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_kl_term_is_k3_averaged_as_the_loss_averages(name):
    reference = torch.tensor(REFERENCE, dtype=torch.float64)
    given = inputs(reference_logprobs=reference)
    plain, penalised = run(name, given), run(name, given, kl_coef=0.7)
    first, second = KL_WEIGHTS[name]
    weights = (first, first, second)
    expected = 0.7 * sum(w * kl for w, kl in zip(weights, KL, strict=True))
    assert (penalised.loss - plain.loss).item() == pytest.approx(expected, rel=1e-9)
    slopes = [0.7 * w * slope for w, slope in zip(weights, KL_SLOPE, strict=True)]
    before, after = gradient(plain, given), gradient(penalised, given)
    found = [b - a for a, b in zip(before, after, strict=True)]
    assert found == pytest.approx(slopes, rel=1e-9)
    assert penalised.sums["reference_kl"].item() == pytest.approx(sum(KL), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_policy_far_away_gives_a_finite_loss(name):
    far = torch.tensor([-300.0, -0.1, -0.1], dtype=torch.float32)
    old = torch.tensor([-0.1, -200.0, -400.0], dtype=torch.float32)
    given = inputs(
        logprobs=torch.full((3,), -0.1).requires_grad_(),
        old_logprobs=old,
        rollout_logprobs=far,
        reference_logprobs=far.flip(0),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
    )
    output = run(name, given, kl_coef=0.1, tis_cap=2.0)
    assert output.loss.isfinite()
    assert all(abs(slope) < float("inf") for slope in gradient(output, given))
