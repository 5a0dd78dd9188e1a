"""Every loss against arithmetic on plain floats, value and gradient.

The worked example is two sequences of a batch of three: the first generated tokens 0 and 1 and was
better than its group, the second generated token 2 and was worse. Under the usual clipping (0.2)
token 0 is free, token 1 went up too far and token 2 down too far.
"""

from dataclasses import replace
from math import exp

import pytest
import torch

from longtail.rl.loss import LOSSES, LossInputs, LossOutput, LossSettings

NOW = (-1.0, -0.5, -2.0)
OLD = (-1.1, -0.9, -1.6)
ROLLOUT = (-1.3, -0.8, -1.9)
REFERENCE = (-0.9, -0.7, -2.2)
BETTER, WORSE = 1.0, -0.5
SEQUENCES, TOKENS, BUDGET = 3, 5, 4  # of the whole batch; the rest of it is in another micro-batch

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
        num_sequences=SEQUENCES,
        num_generated=TOKENS,
    )
    return replace(example, **changes)


def settings(name: str, **changes) -> LossSettings:
    spec = LOSSES[name]
    constants = LossSettings(clip_low=spec.clip_low, clip_high=spec.clip_high, max_tokens=BUDGET)
    return replace(constants, **changes)


def run(name: str, given: LossInputs, **changes) -> LossOutput:
    return LOSSES[name].function(given, settings(name, **changes))


def gradient(output: LossOutput, given: LossInputs) -> list[float]:
    return torch.autograd.grad(output.loss, given.logprobs)[0].tolist()


# Token losses: token 0 is free (R0 A), token 1 is held at the upper clip, token 2 at the lower.
FREE, HELD_UP, HELD_DOWN = -R0 * BETTER, -1.2 * BETTER, -0.8 * WORSE
TOKEN_LOSSES = {
    "grpo": ((FREE + HELD_UP) / 2 + HELD_DOWN) / SEQUENCES,
    "dr_grpo": (FREE + HELD_UP + HELD_DOWN) / (SEQUENCES * BUDGET),
    "dapo": (FREE - 1.28 * BETTER + HELD_DOWN) / TOKENS,
    "reinforce_pp": (FREE + HELD_UP + HELD_DOWN) / TOKENS,
}
TOKEN_SLOPES = {
    "grpo": FREE / 2 / SEQUENCES,
    "dr_grpo": FREE / (SEQUENCES * BUDGET),
    "dapo": FREE / TOKENS,
    "reinforce_pp": FREE / TOKENS,
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_token_loss_is_the_sum_written_out(name):
    given = inputs()
    output = run(name, given)
    assert output.loss.item() == pytest.approx(TOKEN_LOSSES[name], rel=1e-12)
    # Only the free token has a slope: d(R0 A)/d logprob = R0 A.
    assert gradient(output, given) == pytest.approx([TOKEN_SLOPES[name], 0.0, 0.0], rel=1e-12)
    assert output.sums.clipped.item() == 2.0


def test_gspo_clips_the_geometric_mean_of_a_sequence():
    given = inputs()
    output = run("gspo", given)
    # Sequence 0: s = exp((0.1 + 0.4) / 2), far above 1 + 4e-4; sequence 1: s = exp(-0.4).
    expected = -(1.0004 * BETTER + (1 - 3e-4) * WORSE) / SEQUENCES
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(output, given) == [0.0, 0.0, 0.0]
    assert output.sums.clipped.item() == 3.0  # all tokens of both sequences


def test_gspo_inside_its_clip_gives_each_token_an_equal_share_of_the_slope():
    given = inputs()
    output = run("gspo", given, clip_low=0.5, clip_high=0.5)
    mean_ratio = exp(0.25)
    expected = -(mean_ratio * BETTER + R2 * WORSE) / SEQUENCES
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    share = -mean_ratio * BETTER / 2 / SEQUENCES
    slopes = [share, share, -R2 * WORSE / SEQUENCES]
    assert gradient(output, given) == pytest.approx(slopes, rel=1e-12)


def test_rloo_takes_the_ratio_of_a_whole_completion():
    given = inputs()
    output = run("rloo", given, clip_low=0.5, clip_high=0.7)
    # Sequence 0: ratio exp(0.1 + 0.4) = 1.65, inside; sequence 1: exp(-0.4) = 0.67, inside.
    expected = -(exp(0.5) * BETTER + R2 * WORSE) / SEQUENCES
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    slope = -exp(0.5) * BETTER / SEQUENCES
    slopes = [slope, slope, -R2 * WORSE / SEQUENCES]
    assert gradient(output, given) == pytest.approx(slopes, rel=1e-12)


def test_on_policy_rloo_has_the_gradient_of_reinforce():
    given = inputs(old_logprobs=torch.tensor(NOW, dtype=torch.float64))
    slopes = [-BETTER / SEQUENCES, -BETTER / SEQUENCES, -WORSE / SEQUENCES]
    assert gradient(run("rloo", given), given) == pytest.approx(slopes, rel=1e-12)


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
    assert penalised.sums.reference_kl.item() == pytest.approx(sum(KL), rel=1e-12)


def test_importance_weights_are_truncated_token_by_token():
    given = inputs()
    output = run("dapo", given, tis_cap=1.21)
    # old - rollout = 0.2, -0.1, 0.3: weights exp(0.2) = 1.2214 -> 1.21, 0.9048, 1.3499 -> 1.21
    expected = (1.21 * FREE - exp(-0.1) * 1.28 * BETTER + 1.21 * HELD_DOWN) / TOKENS
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert gradient(output, given)[0] == pytest.approx(1.21 * FREE / TOKENS, rel=1e-12)
    assert output.sums.capped.item() == 2.0


def test_sequence_losses_weigh_whole_sequences():
    given = inputs()
    wide = {"clip_low": 0.9, "clip_high": 9.0, "tis_cap": 1.2}
    # rloo: exp(0.2 - 0.1) for sequence 0, exp(0.3) -> 1.2 for sequence 1
    expected = -(exp(0.1) * exp(0.5) * BETTER + 1.2 * R2 * WORSE) / SEQUENCES
    assert run("rloo", given, **wide).loss.item() == pytest.approx(expected, rel=1e-12)
    # gspo: geometric means, exp(0.1 / 2) and exp(0.3) -> 1.2
    output = run("gspo", given, **wide)
    expected = -(exp(0.05) * exp(0.25) * BETTER + 1.2 * R2 * WORSE) / SEQUENCES
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.sums.capped.item() == 1.0


def test_the_divergence_from_the_old_policy_is_logged():
    log_ratios = [now - old for now, old in zip(NOW, OLD, strict=True)]
    expected = sum(exp(x) - x - 1 for x in log_ratios)
    assert run("grpo", inputs()).sums.old_kl.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_cutting_a_batch_cannot_change_its_gradient(name):
    generator = torch.Generator().manual_seed(3)
    lengths = [3, 1, 0, 4, 2]
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(count, generator=generator, dtype=torch.float64)

    now = (noise(0.5) - 2).requires_grad_()
    old, advantage = now.detach() + noise(0.2), noise(1.0)[sequence]
    columns = (old, old + noise(0.1), old + noise(0.3), advantage)

    def total(cuts: list[list[int]]) -> tuple[float, list[float]]:
        losses = []
        for members in cuts:
            rows = torch.cat([(sequence == s).nonzero()[:, 0] for s in members])
            local = torch.cat([torch.full((lengths[s],), i) for i, s in enumerate(members)])
            old_rows, rollout_rows, reference_rows, advantage_rows = (c[rows] for c in columns)
            given = LossInputs(
                logprobs=now[rows],
                old_logprobs=old_rows,
                rollout_logprobs=rollout_rows,
                reference_logprobs=reference_rows,
                advantages=advantage_rows,
                sequence=local.to(torch.int64),
                num_here=len(members),
                num_sequences=5,
                num_generated=count,
            )
            losses.append(run(name, given, kl_coef=0.1, tis_cap=1.1, clip_low=0.1).loss)
        loss = torch.stack(losses).sum()
        return loss.item(), torch.autograd.grad(loss, now)[0].tolist()

    whole_loss, whole_gradient = total([[0, 1, 2, 3, 4]])
    assert any(abs(g) > 1e-3 for g in whole_gradient)
    for cuts in ([[4, 0], [2, 1, 3]], [[0], [1], [2], [3], [4]]):
        loss, slopes = total(cuts)
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        assert slopes == pytest.approx(whole_gradient, rel=1e-12, abs=1e-15)


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


def test_the_constants_are_those_of_the_papers():
    clips = {name: (spec.clip_low, spec.clip_high) for name, spec in LOSSES.items()}
    assert clips["dapo"] == (0.2, 0.28)
    assert clips["gspo"] == (3e-4, 4e-4)
    assert all(clips[name] == (0.2, 0.2) for name in ("grpo", "dr_grpo", "rloo", "reinforce_pp"))
    assert [name for name, spec in LOSSES.items() if spec.dynamic_sampling] == ["dapo"]
    # dr_grpo does not divide by the deviation; rloo leaves the completion itself out.
    rewards = [[1.0, 0.0, 0.0, 1.0]]
    assert LOSSES["dr_grpo"].advantages(rewards) == [[0.5, -0.5, -0.5, 0.5]]
    assert LOSSES["rloo"].advantages(rewards)[0][0] == pytest.approx(2 / 3)
    for name in ("grpo", "dapo", "gspo"):
        assert LOSSES[name].advantages(rewards)[0][0] == pytest.approx(0.5 * 3**0.5, rel=1e-5)
