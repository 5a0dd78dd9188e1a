"""Laws 8 and 10 of the learner: an update does not depend on order, timing or what was held.

Ranks of a process group are in tests/unit/rl/test_parallel_learner.py.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.config.losses import ADVANTAGES, LOSSES
from longtail.config.rl import LearnerSection
from longtail.errors import NonFiniteError
from longtail.model.attention import PackedAttention
from longtail.model.kernels import fixed_point, native
from longtail.rl.advantage import shaped_rewards
from longtail.rl.configured_loss import by_group
from longtail.rl.data.requests import regroup
from longtail.rl.learner import Learner
from longtail.rl.loss import LossInputs, LossSettings
from longtail.rl.optim import Optimizer
from longtail.rl.packing import pack_group, pack_rollouts
from longtail.types import SamplingParams
from support.rank_processes import SETTINGS, Plan, new_learner
from support.rollouts import rollout
from support.tiny_models import tiny_model

BATCH = Plan(seed=2, idle=(3,)).batches()[0]
COUNT = len(BATCH.micro_batches)


def state(learner: Learner) -> dict[str, torch.Tensor]:
    return {**learner.learned(), **learner.state().tensors}


@settings(max_examples=6)
@given(
    order=st.permutations(range(COUNT)),
    first=st.integers(0, COUNT),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_an_update_has_the_same_bits_in_any_order_and_with_any_part_of_it_made_before(
    order, first, dtype
):
    usual, other = (new_learner(dtype=dtype) for _ in range(2))
    expected = usual.step([BATCH])
    for index in order[:first]:
        other.accumulate(BATCH.micro_batches[index], BATCH.sampling)
    shuffled = tuple(BATCH.micro_batches[index] for index in order)
    report = other.step([replace(BATCH, micro_batches=shuffled)])
    ours, theirs = state(other), state(usual)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert report.metrics == expected.metrics
    assert report.metrics["actor/grad_norm"] > SETTINGS.max_grad_norm


def test_float_sums_make_the_same_update_but_for_its_last_bits_and_refuse_the_same():
    """In float64, where the last bits are far from what a test sees."""
    exact, rounded = (
        new_learner(SETTINGS.model_copy(update={"sums": sums})) for sums in ("exact", "float")
    )
    rounded.accumulate(BATCH.micro_batches[0], BATCH.sampling)
    for learner in (exact, rounded):
        learner.step([BATCH])
    ours, theirs = state(rounded), state(exact)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-9, atol=1e-15)
    with pytest.raises(NonFiniteError, match="no update was made"):
        rounded.step(Plan(seed=2, bad_advantage=1).batches())


@settings(max_examples=40)
@given(
    numbers=st.lists(
        st.floats(-(2.0**21), 2.0**21, width=32)
        | st.sampled_from([2**-41, -3 * 2**-41, 1e-40, -(2.0**22), 1e30]),
        min_size=1,
        max_size=40,
    ),
    factor=st.floats(1e-6, 1.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    threads=st.integers(1, 2),
)
@pytest.mark.skipif(native.functions(torch.float32) is None, reason="needs a C compiler")
def test_kernels_and_torch_add_with_the_same_bits(numbers, factor, dtype, threads):
    part = torch.tensor(numbers * (300 if threads > 1 else 1)).to(dtype)
    found = []
    for functions in (native.functions, lambda dtype: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "functions", functions)
            patch.setattr(torch, "get_num_threads", lambda: threads)
            sums, largest, out = fixed_point.new_sums(part), torch.ones(1), torch.empty_like(part)
            for _ in range(3):
                fixed_point.add_gradient(sums, part, largest[0])
            fixed_point.write_gradient(sums, factor, out)
            found.append((sums, largest, out))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    added = torch.where(part.abs() < fixed_point.LIMIT, part, 0.0).double()
    expected = [3 * round(number * 2.0**fixed_point.BITS) for number in added.tolist()]
    assert found[0][0].tolist() == [expected]
    assert found[0][1].item() == float(part.abs().max())


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rows_of_a_sparse_gradient_are_added_as_the_whole_of_it(exact, dtype):
    rows, values = torch.tensor([[4, 1, 4]]), torch.randn(3, 6, dtype=dtype)
    sparse = torch.sparse_coo_tensor(rows, values, (7, 6), check_invariants=True)
    dense, found = torch.zeros(7, 6, dtype=dtype).index_add_(0, rows[0], values), []
    for gradient in (dense, sparse):
        sums, largest = fixed_point.new_sums(dense, exact=exact), torch.ones(1)
        for _ in range(2):
            fixed_point.add_gradient(sums, gradient, largest[0])
        found += [(sums, largest)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_autograds_of_the_normalised_loss_over_the_whole_batch(loss, monkeypatch):
    """KL and importance weights take part: the policy has left its reference."""
    chosen = SETTINGS.model_copy(update={"loss": loss})
    learner, (batch,) = new_learner(chosen), Plan(seed=3, budget=1000).batches()
    learner.step([batch])
    model, reference = (tiny_model(dtype=torch.float64) for _ in range(2))
    model.load_state_dict(learner.learned(), strict=False)
    model.requires_grad_(True)
    (whole,) = batch.micro_batches
    rows = whole.packed.loss_mask.nonzero()[:, 0]

    def logprobs(of: torch.nn.Module) -> torch.Tensor:
        packed = whole.packed
        hidden = of(packed.tokens, packed.positions, PackedAttention(packed.cu_seqlens))
        scores = of.logits(hidden).log_softmax(-1)[rows - 1]
        return scores.gather(1, packed.tokens[rows][:, None])[:, 0]

    now, spec = logprobs(model), LOSSES[loss]
    inputs = LossInputs(
        logprobs=now,
        old_logprobs=now.detach(),
        rollout_logprobs=whole.rollout_logprobs[rows],
        reference_logprobs=logprobs(reference).detach(),
        advantages=whole.advantages[rows],
        sequence=whole.packed.sequence[rows],
        num_here=whole.packed.num_sequences,
    )
    constants = LossSettings(
        clip_low=spec.clip_low, clip_high=spec.clip_high, kl_coef=0.1, tis_cap=1.02
    )
    counts = {"num_generated": batch.num_generated, "num_sequences": batch.num_sequences}
    assert counts == {"num_generated": 32, "num_sequences": 7}
    divisor = {"dr_grpo": 7 * 16, "dapo": 32, "reinforce_pp": 32}.get(loss, 7)
    expected = spec.function(inputs, constants).loss / divisor
    expected.backward()

    found = {}
    update = Optimizer.update

    def kept(self: Optimizer, step: int) -> object:
        found.update({name: p.grad.clone() for name, p in self._parameters.items()})
        return update(self, step)

    monkeypatch.setattr(Optimizer, "update", kept)
    report = learner.step(Plan(seed=3, budget=12).batches())
    assert report.metrics["actor/loss"] == pytest.approx(expected.item(), abs=1e-12)
    assert report.metrics["actor/kl_loss"] > 1e-5
    assert 0 < report.metrics["training/importance_capped"] < 1
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0.0, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", [n for n in ADVANTAGES if by_group(LearnerSection(advantage=n))])
def test_a_group_alone_has_the_advantages_and_micro_batches_of_the_whole_step(name):
    rollouts = [
        rollout(range(1, 3 + 2 * n), 2, request_id=f"p/{g}@0#{n}", reward=float(n % (g + 1)))
        for g in range(3)
        for n in range(4)
    ]
    groups, estimate = regroup(rollouts), ADVANTAGES[name]
    shape = {"max_tokens": 8, "buffer": 4}
    together = estimate(shaped_rewards(groups, **shape))
    whole = pack_rollouts(
        rollouts, [a for group in together for a in group], sampling=SamplingParams(), budget=9
    )
    parts = []
    for group, expected in zip(groups, together, strict=True):
        (advantages,) = estimate(shaped_rewards([group], **shape))
        assert advantages == expected
        parts += pack_group(group.rollouts, advantages, budget=9)
    assert [one.name for one in parts] == [one.name for one in whole.micro_batches]
    assert len({one.name for one in parts}) == len(parts) > 3
    for ours, theirs in zip(parts, whole.micro_batches, strict=True):
        assert torch.equal(ours.packed.tokens, theirs.packed.tokens)
        assert torch.equal(ours.advantages, theirs.advantages)


def test_what_was_accumulated_can_be_dropped_and_does_not_survive_other_weights():
    usual, other = new_learner(), new_learner()
    usual.step([BATCH])
    other.accumulate(BATCH.micro_batches[0], BATCH.sampling)
    other.restore(other.state(), other.learned())
    passes: list[bool] = []
    other.step([BATCH], passes.append)
    assert passes.count(False) == COUNT
    assert other.digest() == usual.digest()
