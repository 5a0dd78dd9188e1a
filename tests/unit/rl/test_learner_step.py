"""Scored tokens and progress calls of a learner's step."""

from dataclasses import replace

import numpy as np
import pytest

from longtail.rl.learner import Learner
from longtail.rl.loss import LOSSES
from support.rank_processes import SETTINGS, Plan, arrays, new_learner

ALL = tuple(range(7))


def learned(loss: str, *plans: Plan) -> tuple[Learner, int, int]:
    """A learner after some steps, and how many tokens of the last were generated and scored."""
    learner = new_learner(SETTINGS.model_copy(update={"loss": loss, "kl_coef": 0.0}))
    for plan in plans:
        report = learner.step(plan.batches())
    return learner, report.num_generated, report.num_scored


def assert_same_weights(one: Learner, other: Learner) -> None:
    ours, theirs = arrays(one.weights().tensors), arrays(other.weights().tensors)
    for name, array in ours.items():
        assert np.abs(array - theirs[name]).max() <= 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_leaving_out_what_has_no_advantage_changes_no_update(loss, mini_batches):
    plan = Plan(seed=1, idle=(0, 2, 4), mini_batches=mini_batches)
    short = replace(plan, keep_idle=False)
    whole, generated, scored = learned(loss, plan, replace(plan, seed=2))
    assert scored == generated == 32
    part, generated, scored = learned(loss, short, replace(short, seed=2))
    assert (generated, scored) == (32, 32 - 5 - 1 - 3)
    assert_same_weights(whole, part)


def test_a_step_in_which_nothing_has_an_advantage_moves_by_momentum_alone():
    before, idle = Plan(seed=1), Plan(seed=2, idle=ALL)
    whole, _, scored = learned("grpo", before, idle)
    assert scored == 32
    part, generated, scored = learned("grpo", before, replace(idle, keep_idle=False))
    assert (generated, scored) == (32, 0)
    assert_same_weights(whole, part)


def test_progress_is_told_after_every_micro_batch_and_before_others_are_waited_for():
    batches = Plan(seed=1, mini_batches=2).batches()
    heard: list[bool] = []
    new_learner().step(batches, heard.append)
    cut = [len(batch.micro_batches) for batch in batches]
    # The old policy is scored first, then one mini-batch after the other is learned.
    assert heard == [False] * sum(cut) + [waits for n in cut for waits in (*[False] * n, True)]
