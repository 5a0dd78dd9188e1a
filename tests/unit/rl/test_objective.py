"""Losses and advantages by name and by path."""

import inspect

import pytest

from longtail.config.losses import ADVANTAGES, LOSSES
from longtail.config.rl import LearnerSection
from longtail.errors import ConfigError
from longtail.rl import loss as losses
from longtail.rl.data.requests import regroup
from longtail.rl.group_stream import step_batches
from longtail.rl.objective import by_group, check
from longtail.types import SamplingParams
from support.rank_processes import SETTINGS, new_learner
from support.rollouts import rollout

ROLLOUTS = [
    rollout(range(1, 4 + n % 3), 2, request_id=f"p/{n // 3}@0#{n}", reward=float(n % 4))
    for n in range(6)
]
MINE = """
from longtail.config.losses import LossSpec
from longtail.rl.loss import *
spec = LossSpec(token_sum, normaliser=lambda batch: batch.num_generated, clip_high=0.28)
centred = lambda rewards: [[one - sum(group) / len(group) for one in group] for group in rewards]
no_output = lambda inputs, settings: inputs.logprobs.sum()
vector = lambda inputs, settings: LossOutput(loss=inputs.logprobs)
infinite = lambda inputs, settings: LossOutput(loss=inputs.logprobs.sum() / 0)
constant = lambda inputs, settings: LossOutput(loss=inputs.logprobs.detach().sum())
strange = lambda inputs, _: LossOutput(loss=inputs.logprobs.sum(), sums={"x": inputs.logprobs[0]})
short = lambda rewards: rewards[1:]
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
        ("loss", "nowhere:f", "its module cannot be imported"),
        ("loss", "mine:no_outputs", "did you mean no_output"),
        ("loss", "math:pi", "it is of type float, not a function"),
        ("loss", "mine:no_output", "to a LossOutput with one finite number"),
        ("loss", "mine:vector", "to a LossOutput with one finite number"),
        ("loss", "mine:infinite", "of an example it is inf"),
        ("loss", "mine:constant", "does not require grad"),
        ("loss", "mine:strange", "unexpected keyword argument 'x'"),
        ("loss", "builtins:abs", r"abs\(\) takes exactly one argument \(2 given\)"),
        ("advantage", "mine:short", "from the rewards of each group to as many"),
        ("advantage", "mine:nan", "must be finite"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_in_one_sentence(module, field, name, why):
    module(MINE, "mine")
    with pytest.raises(ConfigError, match=rf"^learner.{field} = '{name}': [^\n]*{why}[^\n]*$"):
        check(LearnerSection(**{field: name}), 2)


@pytest.mark.parametrize("name", LOSSES)
def test_a_group_of_one_is_refused_where_completions_are_compared(name):
    check(LearnerSection(loss="reinforce_pp"), 1)
    own = LearnerSection(loss=name, dynamic_sampling=name == "reinforce_pp")
    check(own, 2)
    with pytest.raises(ConfigError, match=r"group_size = 1: learner\.\w+ .*compares"):
        check(own, 1)
