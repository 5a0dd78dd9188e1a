"""Several learner processes compute the steps of a single one, fail together, and recover."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from longtail.errors import NonFiniteError, ProcessGroupError
from longtail.rl.learner import Learner
from longtail.rl.learner_metrics import LearnerReport
from support.rank_processes import (
    SETTINGS,
    Plan,
    RankProcess,
    arrays,
    call_all,
    connect,
    new_learner,
)
from support.tiny_models import tiny_model

Copy = tuple[dict[str, int], dict[str, np.ndarray], dict[str, np.ndarray]]
"""Numbers, moments and weights as numpy arrays."""
STEPS = (Plan(seed=1), Plan(seed=2), Plan(seed=3))
SECONDS = ("logprob_seconds", "backward_seconds", "update_seconds")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankProcess]]:
    """Start three processes; each test gives them new learners and a new group."""
    ranks = [RankProcess() for _ in range(3)]
    yield ranks
    for each in ranks:
        each.end()


def learn_alone(steps: Sequence[Plan]) -> tuple[Learner, list[LearnerReport]]:
    learner = new_learner()
    return learner, [learner.step(plan.batches()) for plan in steps]


def assert_same_weights(ours: dict[str, np.ndarray], learner: Learner) -> None:
    theirs = arrays(learner.weights().tensors)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        # 1e-12 of the largest weight: the order of additions is all that differs.
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def assert_same_moments(ranks: Sequence[RankProcess], learner: Learner) -> None:
    theirs = arrays(learner.state().tensors)
    ours = common_state(ranks)[1]
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def begin(ranks: Sequence[RankProcess]) -> None:
    """Connect new learners."""
    assert call_all(ranks, "begin", SETTINGS) == [None] * len(ranks)
    connect(ranks)


def assert_same_report(ours: LearnerReport, theirs: LearnerReport) -> None:
    assert all(asdict(one)[name] > 0 for one in (ours, theirs) for name in SECONDS)
    for name, value in asdict(theirs).items():
        if name not in SECONDS:
            assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def common_state(ranks: Sequence[RankProcess]) -> Copy:
    """Return the state of all ranks, which has the same bits on each."""
    copies = call_all(ranks, "copy")
    for other in copies[1:]:
        assert other[0] == copies[0][0]
        for ours, theirs in zip(other[1:], copies[0][1:], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())
    found: Copy = copies[0]
    return found


def learn_together(
    ranks: Sequence[RankProcess], steps: Sequence[Plan]
) -> tuple[dict[str, np.ndarray], list[LearnerReport]]:
    """Make the steps on all ranks, which report the same; return weights and reports."""
    reports = []
    for plan in steps:
        results = call_all(ranks, "step", plan)
        assert all(isinstance(one, LearnerReport) for one in results), results
        times = dict.fromkeys(SECONDS, 0.0)
        assert all(replace(one, **times) == replace(results[0], **times) for one in results)
        reports.append(results[0])
    return common_state(ranks)[2], reports


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_group_makes_the_steps_of_a_single_learner(ranks, size, mini_batches):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    assert all(len(batch.micro_batches) > 1 for batch in steps[0].batches())
    single, expected = learn_alone(steps)
    begin(ranks[:size])
    weights, reports = learn_together(ranks[:size], steps)
    assert_same_weights(weights, single)
    assert_same_moments(ranks[:size], single)
    for ours, theirs in zip(reports, expected, strict=True):
        assert_same_report(ours, theirs)
    last = reports[-1]
    assert last.num_updates == mini_batches
    assert last.grad_norm > 0.5, "clipping takes part"
    assert 0 < last.capped_fraction < 1
    assert last.reference_kl > 0


def test_ranks_without_a_micro_batch_make_the_update_of_the_others(ranks):
    steps = [replace(plan, budget=100, mini_batches=2) for plan in STEPS]
    assert all(len(batch.micro_batches) == 1 for batch in steps[0].batches())
    single, expected = learn_alone(steps)
    begin(ranks)
    weights, reports = learn_together(ranks, steps)
    assert_same_weights(weights, single)
    for ours, theirs in zip(reports, expected, strict=True):
        assert_same_report(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [{"bad_advantage": 3}, {"bad_logprob": 5}])
def test_a_loss_that_is_not_finite_on_one_rank_stops_all_ranks(ranks, broken):
    begin(ranks)
    learn_together(ranks, STEPS[:1])
    before = call_all(ranks, "digest")
    results = call_all(ranks, "step", replace(STEPS[1], **broken))
    assert all(isinstance(error, NonFiniteError) for error in results), results
    own = [str(error) for error in results if "micro-batch" in str(error)]
    others = [str(error) for error in results if "ranks [" in str(error)]
    assert (len(own), len(others)) == (1, 2)
    assert all(text.startswith("step 1: the loss") for text in (*own, *others))
    assert call_all(ranks, "digest") == before
    # The failed step leaves no gradient to the next one.
    weights, _ = learn_together(ranks, STEPS[1:])
    assert_same_weights(weights, learn_alone(STEPS)[0])


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_rank_stops_all_ranks(ranks):
    begin(ranks)
    before = call_all(ranks, "digest")
    ranks[2].send("break_gradients")
    assert ranks[2].receive() is None
    results = call_all(ranks, "step", STEPS[0])
    assert {str(error) for error in results} == {
        "step 0: the gradient of layers.0.attention.qkv.weight is not finite; no update was made"
    }
    assert call_all(ranks, "digest") == before
    weights, _ = learn_together(ranks, STEPS)
    assert_same_weights(weights, learn_alone(STEPS)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mini_batches", "backwards"),
    [
        pytest.param(1, 0, id="before-the-sum"),
        pytest.param(2, 1, id="between-two-updates"),
    ],
)
def test_a_step_that_lost_a_rank_changes_nothing_and_can_be_repeated(
    ranks, mini_batches, backwards
):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    fresh, doomed, survivors = RankProcess(), ranks[1], [ranks[0], ranks[2]]
    begin(ranks)
    learn_together(ranks, steps[:1])
    before = call_all(survivors, "digest")
    doomed.send("die_after", backwards)
    assert doomed.receive() is None
    for each in ranks:
        each.send("step", steps[1])
    results = [each.receive() for each in survivors]
    assert all(isinstance(error, ProcessGroupError) for error in results), results
    assert all(re.search(r"the sum of [\d,]+ numbers failed", str(error)) for error in results)
    with pytest.raises(EOFError):
        doomed.receive()
    assert call_all(survivors, "digest") == before

    doomed.end()
    ranks[1] = fresh  # with the initial weights, which are the reference
    if mini_batches == 2:  # with or without the state of another rank, it joins
        ranks[0].send("copy")
        fresh.send("restore", *ranks[0].receive())
        assert fresh.receive() is None
    connect(ranks)
    weights, reports = learn_together(ranks, steps[1:])
    single, expected = learn_alone(steps)
    assert_same_weights(weights, single)
    assert_same_moments(ranks, single)
    assert_same_report(reports[-1], expected[-1])


@pytest.mark.slow
@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("interrupted", [(1, 2), (0, 1, 2)])
def test_ranks_that_missed_an_update_receive_it_when_they_connect_again(
    ranks, mini_batches, interrupted
):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    single, _ = learn_alone(steps)
    begin(ranks)
    learn_together(ranks, steps[:1])
    before = call_all(ranks, "digest")
    assert call_all([ranks[rank] for rank in interrupted], "lose_group") == [None] * len(
        interrupted
    )
    results = call_all(ranks, "step", steps[1])
    assert [isinstance(one, ProcessGroupError) for one in results] == [
        rank in interrupted for rank in range(3)
    ]
    assert [call_all(ranks, "digest")[rank] for rank in interrupted] == [
        before[rank] for rank in interrupted
    ]
    connect(ranks)
    was_made = len(interrupted) < len(ranks)
    assert common_state(ranks)[0] == {"version": 1 + was_made}
    weights, _ = learn_together(ranks, steps[1 + was_made :])
    assert_same_weights(weights, single)
    assert_same_moments(ranks, single)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_a_group_of_another_size_continues_from_a_checkpoint(ranks, before, after):
    single, _ = learn_alone(STEPS)
    begin(ranks[:before])
    learn_together(ranks[:before], STEPS[:1])
    kept = common_state(ranks[:before])
    begin(ranks[:after])
    assert call_all(ranks[:after], "restore", *kept) == [None] * after
    weights, _ = learn_together(ranks[:after], STEPS[1:])
    assert_same_weights(weights, single)
    assert_same_moments(ranks[:after], single)


@pytest.mark.slow
def test_any_two_weights_have_different_digests():
    learner, twin = new_learner(), new_learner()
    assert learner.digest() == twin.digest()
    learner.step(STEPS[0].batches())
    after = learner.digest()
    assert after != twin.digest()
    twin.restore(learner.state(), learner.weights().tensors)
    assert twin.digest() == after
    weights = dict(learner.weights().tensors)
    weights["norm.weight"].view(torch.int64)[3] ^= 1
    twin.restore(learner.state(), weights)
    assert twin.digest() != after
    tied = Learner(tiny_model("qwen2"), SETTINGS)
    assert Learner(tiny_model(), SETTINGS).digest() != tied.digest()
