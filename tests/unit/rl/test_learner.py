"""The learner against a slow, separate calculation; its promises about state and failure."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save

from longtail.config.rl import LearnerSection
from longtail.errors import CheckpointError, ConfigError, NonFiniteError
from longtail.model.attention import PackedAttention
from longtail.model.kernels import native
from longtail.model.transformer import Transformer
from longtail.rl import learner as learner_module
from longtail.rl.learner import Learner
from longtail.rl.logprobs import score
from longtail.rl.loss import LOSSES
from longtail.rl.packing import lay_out, pack_mini_batches, pack_rollouts
from longtail.types import Rollout, SamplingParams, TrainBatch
from support.processors import needs_bfloat16
from support.rollouts import rollout
from support.tiny_models import tiny_model

SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)
# eps = 1 makes AdamW's first update lr g / (|g| + 1): smooth in g, so that weights compare as
# gradients do (with a tiny eps it would be sign(g), whatever noise g is).
SMOOTH = LearnerSection(learning_rate=0.05, eps=1.0, max_grad_norm=1e9)


def rollouts(model: Transformer, lengths=((3, 5), (2, 9), (4, 1), (1, 7))) -> list[Rollout]:
    """Random completions, with logprobs near the model's own, as an engine would report them."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for index, (prompt_len, completion_len) in enumerate(lengths):
        tokens = torch.randint(
            0, model.config.vocab_size, (prompt_len + completion_len,), generator=generator
        )
        own = alone(model, tokens, prompt_len, SAMPLING.temperature).detach()
        noise = 0.05 * torch.randn(completion_len, generator=generator, dtype=own.dtype)
        logprobs = tuple((own + noise).tolist())
        made.append(rollout(tokens.tolist(), prompt_len, number=index, logprobs=logprobs))
    return made


ADVANTAGES = [1.0, -0.7, 0.4, -1.3]


def alone(model: Transformer, tokens: torch.Tensor, prompt_len: int, temperature: float):
    """Logprobs of one completion from a forward pass over it alone, the LM head on every row."""
    count = len(tokens)
    hidden = model(tokens, torch.arange(count), PackedAttention((0, count)))
    logprobs = F.log_softmax(model.logits(hidden) / temperature, dim=-1)
    rows = torch.arange(prompt_len - 1, count - 1)
    return logprobs[rows, tokens[prompt_len:]]


def batch(model: Transformer, budget: int = 12, sampling=SAMPLING, **changes) -> TrainBatch:
    made = changes.pop("rollouts", None) or rollouts(model)
    advantages = changes.pop("advantages", ADVANTAGES[: len(made)])
    return pack_rollouts(made, advantages, sampling=sampling, budget=budget)


def learner(model: Transformer | None = None, **changes) -> Learner:
    model = tiny_model(dtype=torch.float64) if model is None else model
    more = {name: changes.pop(name) for name in ("total_steps", "max_logits") if name in changes}
    return Learner(model, SMOOTH.model_copy(update=changes), **more)


def tensors(one: Learner) -> dict[str, torch.Tensor]:
    return dict(one.weights().tensors)


def assert_same_weights(first: Learner, second: Learner, *, tolerance: float = 0.0) -> None:
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0.0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_logprobs_are_those_of_each_sequence_alone(family, temperature):
    model = tiny_model(family, dtype=torch.float64)
    made = rollouts(model)
    sampling = replace(SAMPLING, temperature=temperature)
    texts = [one.prompt.tokens + one.completion.tokens for one in made]
    prompts = [len(one.prompt.tokens) for one in made]
    packed = lay_out(texts, prompts)
    found = score(model, packed, sampling)
    expected = torch.cat(
        [alone(model, torch.tensor(t), p, temperature) for t, p in zip(texts, prompts, strict=True)]
    )
    torch.testing.assert_close(found.logprobs, expected, rtol=0.0, atol=1e-12)
    assert found.rows.tolist() == packed.loss_mask.nonzero()[:, 0].tolist()


def test_scoring_in_chunks_changes_neither_values_nor_gradients():
    whole, chunked = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    packed = batch(whole, budget=100).micro_batches[0].packed
    rows_at_once = 3 * whole.config.vocab_size
    first = score(whole, packed, SAMPLING)
    second = score(chunked, packed, SAMPLING, max_logits=rows_at_once, recompute=True)
    torch.testing.assert_close(first.logprobs, second.logprobs, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(first.entropy, second.entropy, rtol=0.0, atol=1e-12)
    first.logprobs.sin().sum().backward()
    second.logprobs.sin().sum().backward()
    for (name, a), b in zip(whole.named_parameters(), chunked.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.0, atol=1e-12, msg=name)


def test_entropy_is_that_of_the_sampled_distribution():
    model = tiny_model(dtype=torch.float64)
    packed = batch(model, budget=100).micro_batches[0].packed
    found = score(model, packed, replace(SAMPLING, temperature=0.5, top_k=40))
    hidden = model(packed.tokens, packed.positions, PackedAttention(packed.cu_seqlens))
    top = (model.logits(hidden) / 0.5)[found.rows - 1].topk(40, dim=-1)
    expected = torch.distributions.Categorical(logits=top.values).entropy()
    # A token outside the top 40 joins its own support; look at the others.
    inside = (top.indices == packed.tokens[found.rows, None]).any(-1)
    assert inside.any()
    torch.testing.assert_close(found.entropy[inside], expected[inside], rtol=0.0, atol=1e-12)
    assert not found.entropy.requires_grad


def test_a_truncated_distribution_is_renormalised_over_what_is_kept_and_the_token():
    model = tiny_model(dtype=torch.float64)
    packed = batch(model, budget=100).micro_batches[0].packed
    sampling = replace(SAMPLING, temperature=0.8, top_k=5)
    found = score(model, packed, sampling)
    hidden = model(packed.tokens, packed.positions, PackedAttention(packed.cu_seqlens))
    logits = (model.logits(hidden) / 0.8).tolist()
    outside = 0
    for row, logprob in zip(found.rows.tolist(), found.logprobs.tolist(), strict=True):
        scores, token = logits[row - 1], int(packed.tokens[row])
        kept = set(sorted(range(len(scores)), key=lambda v: -scores[v])[:5])
        outside += token not in kept
        total = math.log(sum(math.exp(scores[v]) for v in kept | {token}))
        assert logprob == pytest.approx(scores[token] - total, abs=1e-12)
    assert outside > 0, "the example must contain a token that truncation would remove"
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), model.norm.weight)
    assert gradient.isfinite().all()


def test_one_grpo_step_is_the_textbook_one():
    model, twin = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    made = rollouts(twin)
    report = learner(model).step([batch(twin, rollouts=made)])

    loss = torch.zeros((), dtype=torch.float64)
    for one, advantage in zip(made, ADVANTAGES, strict=True):
        tokens = torch.tensor(one.prompt.tokens + one.completion.tokens)
        logprobs = alone(twin, tokens, len(one.prompt.tokens), 1.0)
        ratio = (logprobs - logprobs.detach()).exp()  # on policy: 1, with the slope of logprob
        loss = loss - (ratio * advantage).mean() / len(made)
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in twin.parameters()]).norm()
    assert report.loss == pytest.approx(loss.item(), abs=1e-12)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-9)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        expected = theirs - 0.05 * theirs.grad / (theirs.grad.abs() + 1.0)
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_the_packing_budget_does_not_change_the_update(name):
    reports, learners = [], []
    for budget in (8, 13, 1000):
        one = learner(loss=name, kl_coef=0.1, tis_cap=1.02)
        both = batch(tiny_model(dtype=torch.float64), budget=budget)
        reports.append(one.step([both]))
        reports[-1] = one.step([both])  # the second is off policy: ratios, clips and KL take part
        learners.append(one)
    assert reports[0].grad_norm > 1e-3
    assert 0 < reports[0].capped_fraction < 1
    assert reports[0].reference_kl > 0
    for other, report in zip(learners[1:], reports[1:], strict=True):
        assert_same_weights(learners[0], other, tolerance=1e-12)
        assert report.loss == pytest.approx(reports[0].loss, abs=1e-12)
        assert report.entropy == pytest.approx(reports[0].entropy, abs=1e-12)
        assert report.gap_max == pytest.approx(reports[0].gap_max, abs=1e-12)


def test_mini_batches_measure_ratios_from_the_policy_before_the_step():
    model, twin = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    made = rollouts(twin)
    cut = pack_mini_batches(made, ADVANTAGES, sampling=SAMPLING, budget=12, mini_batches=2)
    one = learner(model, loss="dapo", clip_low=9.0, clip_high=9.0)
    report = one.step(cut)
    assert (report.num_updates, report.version) == (2, 1)

    # By hand: both halves' old logprobs come from the initial weights.
    parameters = list(twin.parameters())
    adam = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)
    sequences = [torch.tensor(r.prompt.tokens + r.completion.tokens) for r in made]
    prompts = [len(r.prompt.tokens) for r in made]

    def logprobs(index: int) -> torch.Tensor:
        return alone(twin, sequences[index], prompts[index], 1.0)

    old = [logprobs(index).detach() for index in range(4)]
    for half in ((0, 1), (2, 3)):
        count = sum(len(old[i]) for i in half)
        terms = [((logprobs(i) - old[i]).exp() * ADVANTAGES[i]).sum() for i in half]
        adam.zero_grad()
        (-sum(terms) / count).backward()
        adam.step()
    for (name, ours), theirs in zip(model.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-12, msg=name)
    assert report.old_kl > 0


def test_one_update_is_on_policy():
    report = learner().step([batch(tiny_model(dtype=torch.float64))])
    assert (report.old_kl, report.clip_fraction) == (0.0, 0.0)


def test_the_gap_between_rollout_and_learner_is_measured():
    model = tiny_model(dtype=torch.float64)
    made = rollouts(model, lengths=((2, 2), (3, 2)))
    sequences = [torch.tensor(r.prompt.tokens + r.completion.tokens) for r in made]
    gaps = [(0.1, -0.3), (0.0, 0.2)]  # learner minus rollout
    shifted = [
        replace(
            one,
            completion=replace(
                one.completion,
                logprobs=tuple(
                    own - gap
                    for own, gap in zip(
                        alone(model, tokens, len(one.prompt.tokens), 1.0).tolist(),
                        gap_pair,
                        strict=True,
                    )
                ),
            ),
        )
        for one, tokens, gap_pair in zip(made, sequences, gaps, strict=True)
    ]
    report = learner(model).step([batch(model, rollouts=shifted)])
    assert report.gap_mean == pytest.approx((0.1 + 0.3 + 0.2) / 4)
    assert report.gap_max == pytest.approx(0.3)
    ratios = [math.exp(g) for pair in gaps for g in pair]
    assert report.rollout_ratio_mean == pytest.approx(sum(ratios) / 4)
    assert report.rollout_ratio_min == pytest.approx(min(ratios))
    assert report.rollout_ratio_max == pytest.approx(max(ratios))
    assert report.metrics["training/rollout_logprob_gap_max"] == report.gap_max


def test_the_reference_is_the_policy_at_construction():
    model = tiny_model(dtype=torch.float64)
    one = learner(model, kl_coef=0.5)
    both = batch(tiny_model(dtype=torch.float64))
    assert one.step([both]).reference_kl == pytest.approx(0.0, abs=1e-12)
    second = one.step([both])
    assert second.reference_kl > 1e-4
    # At the reference KL has no slope, so a free learner takes the same first step; at the second
    # step the losses differ by the KL alone.
    free = learner(kl_coef=1e-9)
    free.step([both])
    unpenalised = free.step([both])
    assert second.loss > unpenalised.loss + 0.5 * 1e-4
    assert second.grad_norm != pytest.approx(unpenalised.grad_norm, rel=1e-3)


def test_gradient_checkpointing_gives_the_same_weights():
    both = batch(tiny_model(dtype=torch.float64))
    forwards = {False: 0, True: 0}
    learners = []
    for recompute in (False, True):
        model = tiny_model(dtype=torch.float64)

        def count(*_, recompute=recompute) -> None:
            forwards[recompute] += 1

        model.layers[0].register_forward_pre_hook(count)
        learners.append(learner(model, gradient_checkpointing=recompute, max_logits=300))
        learners[-1].step([both])
    assert_same_weights(*learners, tolerance=1e-13)
    assert forwards[True] == 2 * forwards[False] == 2 * len(both.micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_autocast_comes_close_to_float32(family, recompute):
    model = tiny_model(family)
    both = batch(model)
    plain = learner(tiny_model(family))
    mixed = learner(model, autocast=True, gradient_checkpointing=recompute)
    exact, rounded = plain.step([both]), mixed.step([both])
    # bfloat16 has 8 bits: logits of +-3 err by about 0.02, a gradient by a few per cent.
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
    assert 1e-4 < abs(rounded.gap_mean - exact.gap_mean) < 0.1
    assert all(tensor.dtype == torch.float32 for tensor in tensors(mixed).values())
    start = dict(tiny_model(family).named_parameters())
    moved = torch.cat([(tensors(plain)[n] - start[n].detach()).flatten() for n in start])
    also = torch.cat([(tensors(mixed)[n] - start[n].detach()).flatten() for n in start])
    assert F.cosine_similarity(moved, also, dim=0) > 0.98


@needs_bfloat16
@pytest.mark.parametrize("compiled", [True, False])
def test_weights_converted_once_an_update_give_the_update_of_autocast(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "functions", lambda dtype: None)
    both = pack_mini_batches(
        rollouts(tiny_model()), ADVANTAGES, sampling=SAMPLING, budget=12, mini_batches=2
    )
    learners = []
    for holds in (True, False):
        monkeypatch.setattr(learner_module, "can_hold_casts", lambda device, holds=holds: holds)
        learners.append(learner(tiny_model(), autocast=True))
        learners[-1].step(both)
        learners[-1].step(both)
    start = dict(tiny_model().named_parameters())
    moved, also = (
        torch.cat([(tensors(one)[n] - start[n].detach()).flatten() for n in start])
        for one in learners
    )
    # The second update of a step uses the weights of the first; stale ones would be far off.
    assert F.cosine_similarity(moved, also, dim=0) > 0.999
    assert float((moved - also).norm()) < 0.03 * float(also.norm())
    model = tiny_model()
    learner(model, autocast=True).step(both)
    assert model.head.cast is None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_a_resumed_learner_goes_on_bit_for_bit():
    settings = LearnerSection(
        learning_rate=0.01, schedule="cosine", warmup_steps=1, weight_decay=0.1, kl_coef=0.1
    )
    batches = [
        batch(tiny_model(), advantages=advantages)
        for advantages in ([1.0, -1.0, 0.5, 0.2], [-0.3, 0.9, 0.1, -1.0], [0.4, 0.4, -0.8, 0.1])
    ]
    through = Learner(tiny_model(), settings, total_steps=5)
    for one in batches[:2]:
        through.step([one])
    state, weights = through.state(), through.weights()
    stored = save({**state.tensors, **{f"w/{n}": t for n, t in weights.tensors.items()}})
    numbers = json.dumps(dict(state.numbers))
    expected = through.step([batches[2]])

    read = load(stored)
    resumed = Learner(tiny_model(), settings, total_steps=5)
    resumed.restore(
        replace(
            state,
            tensors={n: t for n, t in read.items() if not n.startswith("w/")},
            numbers=json.loads(numbers),
        ),
        {n.removeprefix("w/"): t for n, t in read.items() if n.startswith("w/")},
    )
    assert resumed.version == 2
    report = resumed.step([batches[2]])
    assert_same_weights(through, resumed)
    times = {"logprob_seconds": 0.0, "backward_seconds": 0.0, "update_seconds": 0.0}
    assert replace(report, **times) == replace(expected, **times)


def test_a_fresh_learner_can_be_saved_and_restored():
    first, second = learner(), learner(tiny_model(seed=5, dtype=torch.float64))
    second.restore(first.state(), first.weights().tensors)
    assert_same_weights(first, second)


def test_the_weights_of_another_model_are_refused():
    one = learner()
    weights = tensors(one)
    del weights["norm.weight"]
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        one.restore(one.state(), weights)


def test_published_weights_are_never_modified():
    model = tiny_model("qwen2", dtype=torch.float64)
    one = learner(model)
    before = one.weights()
    copies = {name: tensor.clone() for name, tensor in before.tensors.items()}
    assert set(copies) == {name for name, _ in model.named_parameters()}
    one.step([batch(tiny_model("qwen2", dtype=torch.float64))])
    after = one.weights()
    assert (before.version, after.version) == (0, 1)
    assert all(torch.equal(before.tensors[name], copies[name]) for name in copies)
    assert not all(torch.equal(after.tensors[name], copies[name]) for name in copies)
    assert not any(tensor.requires_grad for tensor in after.tensors.values())


def test_broken_weights_stop_the_step_by_name():
    model = tiny_model()
    both = batch(tiny_model())
    with torch.no_grad():
        model.layers[1].feed_forward.down.weight[0, 0] = float("nan")
    with pytest.raises(
        NonFiniteError, match=r"step 0: layers\.1\.feed_forward\.down\.weight is not finite"
    ):
        learner(model).step([both])


def test_a_loss_that_is_not_finite_leaves_the_learner_as_it_was():
    one = learner()
    good = batch(tiny_model(dtype=torch.float64), budget=8)
    one.step([good])
    weights, state = tensors(one), one.state()
    bad = batch(
        tiny_model(dtype=torch.float64), budget=8, advantages=[1.0, 0.5, float("nan"), -1.0]
    )
    with pytest.raises(NonFiniteError, match=r"step 1: the loss \(micro-batch \d\) is not finite"):
        one.step([bad])
    assert one.version == 1
    assert all(torch.equal(tensor, weights[name]) for name, tensor in tensors(one).items())
    after = one.state()
    assert all(torch.equal(after.tensors[n], tensor) for n, tensor in state.tensors.items())
    # No gradient of the failed step leaks into the next one.
    other = learner()
    other.step([good])
    one.step([good])
    other.step([good])
    assert_same_weights(one, other)


def test_a_gradient_that_is_not_finite_is_named():
    model = tiny_model()
    both = batch(model)
    one = learner(model)
    model.layers[0].attention.qkv.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = tensors(one)
    with pytest.raises(NonFiniteError, match=r"gradient of layers\.0\.attention\.qkv\.weight"):
        one.step([both])
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(one).items())


def test_greedy_rollouts_cannot_train():
    greedy = batch(tiny_model(dtype=torch.float64), sampling=SamplingParams(temperature=0.0))
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0"):
        learner().step([greedy])


def test_autocast_over_float64_is_refused():
    with pytest.raises(ConfigError, match=r"learner\.autocast"):
        learner(autocast=True)


@pytest.mark.parametrize(
    "batches",
    [[], [TrainBatch(micro_batches=(), sampling=SAMPLING, num_sequences=0, num_generated=0)]],
)
def test_a_step_without_anything_to_learn_only_counts(batches):
    one = learner()
    before = tensors(one)
    report = one.step(batches)
    assert (report.num_updates, report.version, report.loss) == (0, 1, 0.0)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(one).items())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_makes_the_better_completion_likelier(name):
    model = tiny_model(dtype=torch.float64)
    made = rollouts(model, lengths=((3, 4), (3, 4)))
    one = learner(model, loss=name, learning_rate=0.02)

    def logprob(index: int) -> float:
        tokens = torch.tensor(made[index].prompt.tokens + made[index].completion.tokens)
        with torch.no_grad():
            return float(alone(model, tokens, 3, 1.0).sum())

    before = logprob(0) - logprob(1)
    for _ in range(3):
        one.step([batch(model, rollouts=made, advantages=[1.0, -1.0])])
    assert logprob(0) - logprob(1) > before + 0.01


def test_the_schedule_counts_steps_and_not_updates():
    one = learner(learning_rate=1e-3, schedule="linear", total_steps=4)
    made = rollouts(tiny_model(dtype=torch.float64))
    cut = pack_mini_batches(made, ADVANTAGES, sampling=SAMPLING, budget=12, mini_batches=2)
    rates = [one.step(cut).learning_rate for _ in range(4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
