"""The learner against a slow, separate calculation; its promises about state and failure."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError, NonFiniteError
from longtail.model.attention import PackedAttention
from longtail.model.kernels import native
from longtail.model.transformer import Transformer
from longtail.rl import learner as learner_module
from longtail.rl.learner import Learner
from longtail.rl.logprobs import score
from longtail.rl.packing import pack_mini_batches, pack_rollouts
from longtail.system import machine
from longtail.types import Rollout, SamplingParams, TrainBatch
from support.processors import needs_bfloat16
from support.rank_processes import SETTINGS, Plan, new_learner
from support.rollouts import rollout
from support.tiny_models import tiny_model

SAMPLING = SamplingParams(temperature=1.0, max_tokens=16)
# eps = 1 makes AdamW's first update lr g / (|g| + 1): smooth in g, so that weights compare as
# gradients do (with a tiny eps it would be sign(g), whatever noise g is).
SMOOTH = LearnerSection(learning_rate=0.05, eps=1.0, max_grad_norm=1e9)


ADVANTAGES = [1.0, -0.7, 0.4, -1.3]
LENGTHS = ((3, 5), (2, 9), (4, 1), (1, 7))


BATCHES = Plan(seed=1).batches()


def rollouts(
    model: Transformer,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    gaps: Sequence[Sequence[float]] | None = None,
) -> list[Rollout]:
    """Random completions; their logprobs are the model's own less `gaps`."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for index, (prompt_len, completion_len) in enumerate(lengths):
        tokens = torch.randint(0, 128, (prompt_len + completion_len,), generator=generator)
        logprobs = alone(model, tokens, prompt_len).detach()
        if gaps is not None:
            logprobs -= torch.tensor(gaps[index])
        made.append(
            rollout(tokens.tolist(), prompt_len, number=index, logprobs=tuple(logprobs.tolist()))
        )
    return made


def alone(model: Transformer, tokens: torch.Tensor, prompt_len: int) -> torch.Tensor:
    """Logprobs of one completion from a forward pass over it alone, the LM head on every row."""
    count = len(tokens)
    hidden = model(tokens, torch.arange(count), PackedAttention((0, count)))
    rows = torch.arange(prompt_len - 1, count - 1)
    return F.log_softmax(model.logits(hidden), dim=-1)[rows, tokens[prompt_len:]]


def learner(model: Transformer | None = None, **changes) -> Learner:
    model = tiny_model(dtype=torch.float64) if model is None else model
    return Learner(model, SMOOTH.model_copy(update=changes))


def assert_same_weights(first: Learner, second: Learner, *, tolerance: float = 0.0) -> None:
    ours, theirs = first.learned(), second.learned()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0.0, atol=tolerance, msg=name)


def test_a_truncated_distribution_is_renormalised_over_what_is_kept_and_the_token():
    model = tiny_model(dtype=torch.float64)
    packed = Plan(seed=1, budget=100).batches()[0].micro_batches[0].packed
    sampling, rows_at_once = replace(SAMPLING, temperature=0.8, top_k=5), 3 * 128
    found = score(model, packed, sampling, max_logits=rows_at_once, recompute=True)
    hidden = model(packed.tokens, packed.positions, PackedAttention(packed.cu_seqlens))
    logits, tokens = (model.logits(hidden) / 0.8)[found.rows - 1], packed.tokens[found.rows]
    kept = logits >= logits.topk(5).values[:, -1:]
    assert not kept.gather(-1, tokens[:, None]).all(), "truncation would remove a token"
    kept.scatter_(-1, tokens[:, None], True)
    expected = torch.distributions.Categorical(logits=logits.masked_fill(~kept, -math.inf))
    torch.testing.assert_close(found.logprobs, expected.log_prob(tokens), rtol=0.0, atol=1e-12)
    torch.testing.assert_close(found.entropy, expected.entropy(), rtol=0.0, atol=1e-12)
    assert not found.entropy.requires_grad
    (gradient,) = torch.autograd.grad(found.logprobs.sum(), model.norm.weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_step_is_the_textbook_one(mini_batches):
    """Ratios are to the policy before the step, in each of its updates."""
    model, twin = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    made = rollouts(twin)
    cut = pack_mini_batches(
        made, ADVANTAGES, sampling=SAMPLING, budget=12, mini_batches=mini_batches
    )
    report = learner(model, loss="dapo", clip_low=9.0, clip_high=9.0).step(cut)
    assert report.version == 1
    assert (report.metrics["actor/ppo_kl"] > 0) == (mini_batches > 1)
    assert report.metrics["actor/pg_clipfrac"] == 0.0

    parameters = list(twin.parameters())
    adam = torch.optim.AdamW(parameters, lr=0.05, betas=(0.9, 0.95), eps=1.0, weight_decay=0.0)

    def logprobs(index: int) -> torch.Tensor:
        prompt, tokens = made[index].prompt.tokens, made[index].completion.tokens
        return alone(twin, torch.tensor(prompt + tokens), len(prompt))

    old = [logprobs(index).detach() for index in range(4)]
    for members in ((0, 1, 2, 3),) if mini_batches == 1 else ((0, 1), (2, 3)):
        count = sum(len(old[i]) for i in members)
        terms = [((logprobs(i) - old[i]).exp() * ADVANTAGES[i]).sum() for i in members]
        adam.zero_grad()
        loss = -sum(terms) / count
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        adam.step()
    for (name, ours), theirs in zip(model.named_parameters(), parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.0, atol=1e-12, msg=name)
    if mini_batches == 1:
        assert report.metrics["actor/loss"] == pytest.approx(loss.item(), abs=1e-12)
        assert report.metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo"])
def test_leaving_out_what_has_no_advantage_changes_no_update(loss):
    learners = []
    for keep_idle, scored in ((True, 32), (False, 32 - 5 - 1 - 3)):
        one = new_learner(SETTINGS.model_copy(update={"loss": loss, "kl_coef": 0.0}))
        for seed in (1, 2):
            plan = Plan(seed=seed, idle=(0, 2, 4), mini_batches=2, keep_idle=keep_idle)
            report = one.step(plan.batches())
        assert report.metrics["actor/nonzero_advantage_share"] == scored / 32
        learners.append(one)
    assert_same_weights(*learners, tolerance=1e-12)


def test_the_gap_between_rollout_and_learner_is_measured():
    model = tiny_model(dtype=torch.float64)
    made = rollouts(model, ((2, 2), (3, 2)), gaps=((0.1, -0.3), (0.0, 0.2)))
    both = pack_rollouts(made, ADVANTAGES[:2], sampling=SAMPLING, budget=12)
    found = learner(model).step([both]).metrics
    assert found["training/rollout_logprob_gap_mean"] == pytest.approx((0.1 + 0.3 + 0.2) / 4)
    assert found["training/rollout_logprob_gap_max"] == pytest.approx(0.3)
    ratios = [math.exp(gap) for gap in (0.1, -0.3, 0.0, 0.2)]
    assert found["training/rollout_ratio_mean"] == pytest.approx(sum(ratios) / 4)
    assert found["training/rollout_ratio_min"] == pytest.approx(min(ratios))
    assert found["training/rollout_ratio_max"] == pytest.approx(max(ratios))


def test_gradient_checkpointing_gives_the_same_weights_and_keeps_what_free_memory_holds(
    monkeypatch,
):
    forwards, learners = [], []
    for recompute, free in ((False, 0), (True, 1), (True, 2)):
        memory = machine.Memory(total=8, available=free)
        monkeypatch.setattr(machine, "memory", lambda memory=memory: memory)
        model, passes = tiny_model(dtype=torch.float64), []
        model.layers[0].register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        learners.append(learner(model, gradient_checkpointing=recompute))
        learners[-1].step(BATCHES)
        assert_same_weights(learners[0], learners[-1], tolerance=0.0)
        forwards.append(len(passes))
    count = len(BATCHES[0].micro_batches)
    assert forwards == [count, 2 * count, count]


def moved(one: Learner) -> torch.Tensor:
    """Return all movements of the weights since their initialization."""
    start = dict(tiny_model().named_parameters())
    return torch.cat([(one.learned()[n] - start[n].detach()).flatten() for n in start])


@needs_bfloat16
@pytest.mark.parametrize("compiled", [True, False])
def test_weights_converted_once_an_update_give_the_update_of_autocast(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(native, "functions", lambda dtype: None)
    both = Plan(seed=1, mini_batches=2).batches()
    learners = []
    for holds in (True, False):
        monkeypatch.setattr(learner_module, "can_hold_casts", lambda device, holds=holds: holds)
        learners.append(learner(tiny_model(), autocast=True))
        learners[-1].step(both)
        learners[-1].step(both)
    ours, theirs = map(moved, learners)
    # The second update of a step uses the weights of the first; stale ones would be far off.
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.999
    assert float((ours - theirs).norm()) < 0.03 * float(theirs.norm())
    model = tiny_model()
    learner(model, autocast=True).step(both)
    assert model.head.cast is None
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("weight", r"step 1: layers\.1\.feed_forward\.down\.weight is not finite"),
        ("advantage", r"step 1: the loss \(micro-batch /\d\) is not finite"),
        ("gradient", r"step 1: the gradient of layers\.0\.attention\.qkv\.weight is not finite"),
        ("size", r"of layers\.0\.attention\.qkv\.weight is up to 1.6e\+07, over 4.2e\+06; no"),
    ],
)
def test_what_is_not_finite_is_named_and_leaves_the_learner_as_it_was(broken, message):
    model, twin = tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64)
    one, other = learner(model), learner(twin)
    for each in (one, other):
        each.step(BATCHES)
    state, bad = one.state(), BATCHES
    weight = model.layers[1].feed_forward.down.weight
    if broken == "advantage":
        bad = Plan(seed=1, bad_advantage=3).batches()
    elif broken in ("gradient", "size"):
        qkv = model.layers[0].attention.qkv.weight
        factor = math.inf if broken == "gradient" else 1e7
        hook = qkv.register_hook(lambda gradient: gradient * factor)
    else:
        kept = weight[0, 0].item()
        weight.data[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=message):
        one.step(bad)
    if broken in ("gradient", "size"):
        hook.remove()
    elif broken == "weight":
        weight.data[0, 0] = kept
    assert one.version == 1
    assert_same_weights(one, other)
    after = one.state()
    assert all(torch.equal(after.tensors[n], tensor) for n, tensor in state.tensors.items())
    # No gradient of the failed step leaks into the next one.
    for each in (one, other):
        each.step(BATCHES)
    assert_same_weights(one, other)


def test_greedy_rollouts_are_refused():
    greedy = replace(BATCHES[0], sampling=SamplingParams(temperature=0.0))
    with pytest.raises(ConfigError, match=r"rollout\.temperature = 0"):
        learner().step([greedy])


@pytest.mark.parametrize(
    "batches",
    [[], [TrainBatch(micro_batches=(), sampling=SAMPLING, num_sequences=0, num_generated=0)]],
)
def test_a_step_without_anything_to_learn_only_counts(batches):
    one = learner()
    before = one.digest()
    report = one.step(batches)
    assert (report.version, report.metrics["actor/loss"]) == (1, 0.0)
    assert all(math.isfinite(value) for value in report.metrics.values())
    assert one.digest() == before


def test_the_schedule_counts_steps_and_not_updates():
    settings = SMOOTH.model_copy(update={"learning_rate": 1e-3, "schedule": "linear"})
    one = Learner(tiny_model(dtype=torch.float64), settings, total_steps=4)
    cut = Plan(seed=1, mini_batches=2).batches()
    rates = [one.step(cut).metrics["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
