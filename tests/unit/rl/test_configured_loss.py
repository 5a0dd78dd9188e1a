"""Losses and advantages by name and by path."""

import inspect
import sys

import pytest

from longtail.config.losses import ADVANTAGES, LOSSES
from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError
from longtail.rl import loss as losses
from longtail.rl.configured_loss import by_group, check
from longtail.rl.data.requests import regroup
from longtail.rl.group_stream import step_batches, streams
from longtail.types import SamplingParams
from support.rank_processes import SETTINGS, new_learner
from support.rollouts import rollout

ROLLOUTS = [
    rollout(range(1, 4 + n % 3), 2, request_id=f"p/{n // 3}@0#{n}", reward=float(n % 4))
    for n in range(6)
]
MINE = """
import torch
from longtail.config.losses import LossSpec
from longtail.rl.loss import *
spec = LossSpec(token_sum, normaliser=lambda batch: batch.num_generated, clip_high=0.28)
centred = lambda rewards: [[one - sum(group) / len(group) for one in group] for group in rewards]
no_output = lambda inputs, settings: inputs.logprobs.sum()
infinite = lambda inputs, settings: LossOutput(loss=inputs.logprobs.sum() / 0)
nothing = lambda inputs, settings: LossOutput(loss=0 * inputs.logprobs.sum())
unlikely = lambda inputs, _: LossOutput(loss=torch.log(-torch.expm1(inputs.logprobs)).sum())
constant = lambda inputs, settings: LossOutput(loss=inputs.logprobs.detach().sum())
late = lambda inputs, _: (len(inputs.logprobs) < 4 or 1 / 0) and unlikely(inputs, _)
zero = LossSpec(unlikely, normaliser=lambda batch: 0)
tensor = LossSpec(unlikely, normaliser=lambda batch: torch.tensor(3))
def changed(name, value):
    object.__setattr__(output := LossOutput(loss=torch.ones(())), name, value)  # no check of types
    return lambda inputs, settings: output
vector = changed("loss", torch.ones(2))
strange, plain = (changed("sums", {name: 0.0}) for name in ("mine", "clipped"))
calls, square = [], lambda rewards: torch.tensor(rewards).tolist()
stateful = lambda rewards: calls.append(0) or [[len(calls) + each for each in g] for g in rewards]
short = lambda rewards: [group[1:] for group in rewards]
nan = lambda rewards: [[float("nan")] * len(group) for group in rewards]
"""


def learned(**own: object) -> str:
    """Return the digest of the weights after a step."""
    learner = new_learner(chosen := SETTINGS.model_copy(update=own))
    learner.step(step_batches(regroup(ROLLOUTS), chosen, SamplingParams(max_tokens=16)))
    return learner.digest()


def test_a_users_copy_of_a_loss_and_of_advantages_learns_the_same_to_the_bit(module):
    names = ("sequence_means", "_output", "_exp", "_kl", "_sequence_sums", "_sequence_means")
    copied = "\n".join(inspect.getsource(vars(losses)[name]) for name in names)
    module(MINE + copied, "mine")
    assert learned(loss="mine:sequence_means") == learned(loss="grpo")
    assert learned(loss="mine:spec") == learned(loss="dapo")
    centred = learned(advantage="mine:centred")
    assert centred == learned(advantage="dr_grpo") != learned(advantage="grpo")


def test_any_loss_learns_from_any_advantages_and_has_its_papers_by_default():
    for loss, spec in LOSSES.items():
        found = {name: learned(loss=loss, advantage=name) for name in ADVANTAGES}
        assert found[spec.advantage] == learned(loss=loss)
        assert len(set(found.values())) == len(ADVANTAGES)
    assert [loss for loss, spec in LOSSES.items() if spec.advantage == loss] == list(ADVANTAGES)
    alone = [name for name in ADVANTAGES if by_group(LearnerSection(advantage=name))]
    assert alone == ["grpo", "dr_grpo", "rloo"]


@pytest.mark.parametrize(
    ("field", "name", "why"),
    [
        ("loss", "nowhere:f", "no module nowhere is in the working directory or on PYTHONPATH"),
        ("loss", "mine:no_outputs", "did you mean no_output"),
        ("loss", "math:pi", "it is of type float, not a function"),
        ("loss", "mine:no_output", r"returned a Tensor; return LossOutput\(loss="),
        ("loss", "mine:vector", r"loss has shape \(2,\); expected a scalar: \.sum\(\)"),
        ("loss", "mine:infinite", "of an example it is -inf"),
        ("loss", "mine:nothing", r"with the gradient \[0.0, 0.0, 0.0\]"),
        ("loss", "mine:constant", "loss does not depend on inputs.logprobs"),
        ("loss", "mine:strange", "sums has 'mine'; known are clipped, capped"),
        ("loss", "mine:plain", "clipped is 0.0; expected a detached scalar tensor"),
        ("loss", "mine:zero", "returned 0; expected a positive number, as batch.num_sequences"),
        ("loss", "mine:tensor", r"returned tensor\(3\); expected a positive number"),
        ("loss", "builtins:abs", r"abs\(\) takes exactly one argument \(2 given\)"),
        ("advantage", "mine:short", "groups of 2 and 3 rewards it returned 1 and 2 advantages"),
        ("advantage", "mine:square", "failed on groups of 2 and 3 rewards; groups differ in size"),
        ("advantage", "mine:nan", "it returned nan, not a finite number"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_in_one_sentence(module, field, name, why):
    module(MINE, "mine")
    with pytest.raises(ConfigError, match=rf"^learner.{field} = '{name}': [^\n]*{why}[^\n]*$"):
        check(LearnerSection(**{field: name}), 2)


def test_what_the_example_does_not_show_is_named_in_the_step(module):
    module(MINE, "mine")
    check(LearnerSection(loss="mine:late"), 2)
    with pytest.raises(ConfigError, match=r"^learner.loss = 'mine:late': ZeroDiv.*mine\.py:"):
        learned(loss="mine:late")


@pytest.mark.parametrize(("loss", "kept"), [("mine:f", 4), ("grpo", 0)])
def test_a_loss_of_ones_own_learns_from_completions_without_an_advantage(loss, kept):
    own = LearnerSection(loss=loss, advantage="grpo")
    equal = [rollout([1, 2, 3, n], 2, request_id=f"p/0@0#{n}") for n in range(2)]
    (batch,) = step_batches(regroup(equal), own, SamplingParams(max_tokens=16))
    assert sum(int(one.packed.loss_mask.sum()) for one in batch.micro_batches) == kept


def test_an_advantage_sees_no_made_up_rewards_after_the_check(module):
    check(own := LearnerSection(advantage=f"{module(MINE, 'mine')}:stateful"), 2)
    before = list(sys.modules["mine"].calls)
    assert (streams(own), sys.modules["mine"].calls) == (False, before)


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_of_one_is_refused_where_completions_are_compared(name):
    check(LearnerSection(loss="reinforce_pp"), 1)
    own = LearnerSection(loss=name, dynamic_sampling=name == "reinforce_pp")
    check(own, 2)
    with pytest.raises(ConfigError, match=r"group_size = 1: learner\.\w+ .*compares"):
        check(own, 1)
