"""Sharded learners make the steps of a single one, and their rows are its state."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from longtail.config.rl import LearnerSection
from longtail.errors import ClusterError, NonFiniteError, ProcessGroupError
from longtail.rl.learner import Learner
from longtail.rl.learner_metrics import LearnerReport
from support.rank_processes import (
    PATIENCE_S,
    SETTINGS,
    Plan,
    RankProcess,
    arrays,
    call_all,
    connect,
    free_address,
    new_learner,
)

Arrays = dict[str, np.ndarray]
SHARDED = SETTINGS.model_copy(update={"sharding": "full"})
STEPS = (Plan(seed=1), Plan(seed=2), Plan(seed=3))
SECONDS = ("logprob_seconds", "backward_seconds", "update_seconds")


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankProcess]]:
    """Start three processes; each test gives them new learners and a new group."""
    ranks = [RankProcess() for _ in range(3)]
    yield ranks
    for each in ranks:
        each.end()


def begin(ranks: Sequence[RankProcess], settings: LearnerSection = SHARDED, **model: Any) -> None:
    """Connect new learners."""
    assert call_all(ranks, "begin", settings, **model) == [None] * len(ranks)
    connect(ranks)


def learn(ranks: Sequence[RankProcess], steps: Sequence[Plan]) -> list[LearnerReport]:
    """Make the steps on all ranks, which report the same."""
    reports = []
    for plan in steps:
        results = call_all(ranks, "step", plan)
        assert all(isinstance(one, LearnerReport) for one in results), results
        times = dict.fromkeys(SECONDS, 0.0)
        assert all(replace(one, **times) == replace(results[0], **times) for one in results)
        reports.append(results[0])
    return reports


def whole_state(ranks: Sequence[RankProcess]) -> tuple[Any, Arrays, Arrays]:
    """Return the numbers, the rows of all ranks' moments, and the weights, equal on all ranks."""
    copies = call_all(ranks, "copy")
    numbers, _, weights = copies[0]
    for other_numbers, _, other_weights in copies:
        assert other_numbers == numbers
        assert all(np.array_equal(array, weights[name]) for name, array in other_weights.items())
    moments = {}
    for name, array in copies[0][1].items():
        rows = [other[name] for _, other, _ in copies]
        moments[name] = np.concatenate(rows) if array.ndim else array
    return numbers, moments, weights


def assert_same(ours: Arrays, theirs: Arrays) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        # 1e-12 of the largest: the order of additions is all that differs.
        assert array.shape == theirs[name].shape
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def assert_same_state(ranks: Sequence[RankProcess], learner: Learner) -> None:
    """Check that the ranks' joined state is that of a learner."""
    numbers, moments, weights = whole_state(ranks)
    assert numbers == {"version": learner.version}
    assert_same(weights, arrays(learner.weights().tensors))
    assert_same(moments, arrays(learner.state().tensors))


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("model", "settings", "plan"),
    [
        pytest.param({}, SHARDED, {}, id="uneven-deals"),
        pytest.param({"family": "qwen2"}, SHARDED, {"mini_batches": 2}, id="tied-two-updates"),
        pytest.param(
            {},
            SHARDED,
            {"mini_batches": 2, "idle": (0, 1, 2), "keep_idle": False},
            id="an-update-without-passes",
        ),
        pytest.param({"head_dim": 4}, SHARDED, {"budget": 100}, id="empty-shards-idle-ranks"),
        pytest.param(
            {"family": "qwen2"},
            SHARDED.model_copy(
                update={"gradient_checkpointing": True, "loss": "gspo", "kl_coef": 0.0}
            ),
            {},
            id="all-computed-again",
        ),
    ],
)
def test_shards_make_the_steps_of_a_single_learner(ranks, size, model, settings, plan):
    steps = [replace(each, **plan) for each in STEPS]
    single = new_learner(settings, **model)
    expected = [single.step(each.batches()) for each in steps]
    begin(ranks[:size], settings, **model)
    reports = learn(ranks[:size], steps)
    assert_same_state(ranks[:size], single)
    for ours, theirs in zip(reports, expected, strict=True):
        for name, value in asdict(theirs).items():
            if name not in SECONDS:
                assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert reports[-1].grad_norm > 0.5, "clipping takes part"


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_shards_work_with_native_kernels_and_with_autocast(ranks, autocast):
    settings = SHARDED.model_copy(update={"autocast": autocast})
    single = new_learner(settings, dtype=torch.float32)
    begin(ranks[:2], settings, dtype=torch.float32)
    for plan in STEPS:
        single.step(plan.batches())
    learn(ranks[:2], STEPS)
    theirs = arrays(single.weights().tensors)
    for name, array in whole_state(ranks[:2])[2].items():
        # Sums in another order err by 2^-24 of a gradient each; updates are 0.05 of it at most.
        assert np.abs(array - theirs[name]).max() <= 1e-6, name


@pytest.mark.slow
def test_a_step_without_a_scored_token_decays_all_shards(ranks):
    idle = Plan(seed=4, idle=tuple(range(7)), keep_idle=False)
    assert not idle.batches()[0].micro_batches
    single = new_learner(SHARDED)
    begin(ranks)
    for plan in (idle, STEPS[0]):
        single.step(plan.batches())
    learn(ranks, (idle, STEPS[0]))
    assert_same_state(ranks, single)


@pytest.mark.slow
def test_a_value_that_is_not_finite_on_one_rank_stops_all_ranks(ranks):
    single = new_learner(SHARDED)
    begin(ranks)
    learn(ranks, STEPS[:1])
    before = call_all(ranks, "digest")
    results = call_all(ranks, "step", replace(STEPS[1], bad_advantage=3))
    assert all(isinstance(error, NonFiniteError) for error in results), results
    assert sorted("micro-batch" in str(error) for error in results) == [False, False, True]
    assert call_all(ranks[1:2], "break_backward") == [None]
    results = call_all(ranks, "step", STEPS[1])
    assert {str(error) for error in results} == {
        "step 1: the gradient of embedding.weight is not finite; no update was made"
    }
    # The failed steps change nothing and leave no gradient to the next one.
    assert call_all(ranks, "digest") == before
    learn(ranks, STEPS[1:])
    for plan in STEPS:
        single.step(plan.batches())
    assert_same_state(ranks, single)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_a_checkpoint_continues_with_any_number_of_shards(ranks, before, after):
    """Restored state has the same bits; later steps differ by the order of additions only."""
    single = new_learner(SHARDED)
    for plan in STEPS:
        single.step(plan.batches())
    begin(ranks[:before])
    learn(ranks[:before], STEPS[:1])
    numbers, moments, weights = kept = whole_state(ranks[:before])
    assert call_all(ranks[:after], "begin", SHARDED) == [None] * after
    assert call_all(ranks[:after], "restore", *kept) == [None] * after
    connect(ranks[:after])
    found = whole_state(ranks[:after])
    assert found[0] == numbers
    for ours, theirs in zip(found[1:], (moments, weights), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())
    learn(ranks[:after], STEPS[1:])
    assert_same_state(ranks[:after], single)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0, 1])
def test_a_lost_shard_ends_the_run_with_a_remedy(ranks, passes):
    fresh, doomed = RankProcess(), ranks[1]
    begin(ranks)
    learn(ranks, STEPS[:1])
    assert call_all([doomed], "die_after_passes", passes) == [None]
    for each in ranks:
        each.send("step", STEPS[1])
    survivors = [ranks[0], ranks[2]]
    results = [each.receive() for each in survivors]
    assert all(isinstance(error, ProcessGroupError) for error in results), results
    doomed.end()
    ranks[1] = fresh
    address = free_address()
    for rank, each in enumerate(survivors):
        each.send("connect", rank, 2, address, PATIENCE_S)
    for error in [each.receive() for each in survivors]:
        assert isinstance(error, ClusterError)
        assert "(learner.sharding); start again: the run resumes from its newest" in str(error)
