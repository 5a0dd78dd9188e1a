"""Several learner processes compute the steps of a single one, fail together, and recover.

Replicated or with shards of the learner (`sharding = "full"`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from support.tiny_models import tiny_model

Arrays = dict[str, np.ndarray]
SHARDED = SETTINGS.model_copy(update={"sharding": "full"})
STEPS = (Plan(seed=1), Plan(seed=2), Plan(seed=3))


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[RankProcess]]:
    """Start three processes; each test gives them new learners and a new group."""
    ranks = [RankProcess() for _ in range(3)]
    yield ranks
    for each in ranks:
        each.end()


def begin(ranks: Sequence[RankProcess], settings: LearnerSection = SETTINGS, **model: Any) -> None:
    """Connect new learners."""
    assert call_all(ranks, "begin", settings, **model) == [None] * len(ranks)
    connect(ranks)


def learn(ranks: Sequence[RankProcess], steps: Sequence[Plan]) -> list[LearnerReport]:
    """Make the steps on all ranks, which report the same."""
    reports = []
    for plan in steps:
        results = call_all(ranks, "step", plan)
        assert all(isinstance(one, LearnerReport) for one in results), results
        assert all(one.metrics == results[0].metrics for one in results)
        reports.append(results[0])
    return reports


def learn_alone(
    steps: Sequence[Plan], settings: LearnerSection = SETTINGS, **model: Any
) -> tuple[Learner, list[LearnerReport]]:
    learner = new_learner(settings, **model)
    return learner, [learner.step(plan.batches()) for plan in steps]


def state_of(
    ranks: Sequence[RankProcess], *, sharded: bool = False
) -> tuple[dict[str, int], Arrays, Arrays]:
    """Return numbers, moments and weights: on each rank the same bits, moments rows if sharded."""
    copies = call_all(ranks, "copy")
    numbers, moments, weights = copies[0]
    for other_numbers, other_moments, other_weights in copies[1:]:
        assert other_numbers == numbers
        same = {**weights} if sharded else {**weights, **moments}
        others = {**other_moments, **other_weights}
        assert all(np.array_equal(array, others[name]) for name, array in same.items())
    if sharded:
        moments = {
            name: np.concatenate([other[name] for _, other, _ in copies]) if array.ndim else array
            for name, array in moments.items()
        }
    return numbers, moments, weights


def assert_same_state(
    ranks: Sequence[RankProcess], learner: Learner, *, sharded: bool = False, exact: bool = True
) -> None:
    """Compare with a learner: the same bits, unless the order of additions differs."""
    numbers, *ours = state_of(ranks, sharded=sharded)
    assert numbers == {"version": learner.version}
    expected = (learner.state().tensors, learner.learned())
    for found, theirs in zip(ours, map(arrays, expected), strict=True):
        assert found.keys() == theirs.keys()
        for name, array in found.items():
            assert array.shape == theirs[name].shape
            tolerance = 0.0 if exact else 1e-12 * np.abs(theirs[name]).max()
            assert np.abs(array - theirs[name]).max() <= tolerance, name


def assert_same_reports(
    ours: Sequence[LearnerReport], theirs: Sequence[LearnerReport], *, exact: bool = True
) -> None:
    for one, other in zip(ours, theirs, strict=True):
        expected = other.metrics
        assert one.metrics == (expected if exact else pytest.approx(expected, rel=1e-9, abs=1e-12))
        assert one.version == other.version


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "model", "settings", "plan"),
    [
        pytest.param(3, {}, SETTINGS, {"budget": 100, "mini_batches": 2}, id="idle-ranks"),
        pytest.param(2, {}, SETTINGS.model_copy(update={"sums": "float"}), {}, id="float-sums"),
        pytest.param(2, {"family": "qwen2"}, SHARDED, {"mini_batches": 2}, id="tied-shards"),
        pytest.param(
            3,
            {},
            SHARDED,
            {"mini_batches": 2, "idle": (0, 1, 2), "keep_idle": False},
            id="shards-without-passes",
        ),
        pytest.param(3, {"head_dim": 4}, SHARDED, {"budget": 100}, id="empty-shards-idle-ranks"),
        pytest.param(
            2,
            {"family": "qwen2"},
            SHARDED.model_copy(
                update={"gradient_checkpointing": True, "loss": "gspo", "kl_coef": 0.0}
            ),
            {},
            id="shards-computed-again",
        ),
    ],
)
def test_a_group_makes_the_steps_of_a_single_learner(ranks, size, model, settings, plan):
    steps = [replace(each, **plan) for each in STEPS]
    batches = [len(batch.micro_batches) for batch in steps[0].batches()]
    assert (min(batches) > 1) == (plan.get("budget") is None and "idle" not in plan)
    single, expected = learn_alone(steps, settings, **model)
    begin(ranks[:size], settings, **model)
    reports = learn(ranks[:size], steps)
    sharded = settings.sharding == "full"
    exact = not sharded and settings.sums == "exact"
    assert_same_state(ranks[:size], single, sharded=sharded, exact=exact)
    assert_same_reports(reports, expected, exact=exact)
    assert reports[-1].metrics["actor/grad_norm"] > 0.5, "clipping takes part"
    assert 0 < reports[-1].metrics["training/importance_capped"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_value_that_is_not_finite_on_one_rank_stops_all_ranks(ranks, sharded):
    settings = SHARDED if sharded else SETTINGS
    begin(ranks, settings)
    learn(ranks, STEPS[:1])
    before = call_all(ranks, "digest")
    results = call_all(ranks, "step", replace(STEPS[1], bad_advantage=3))
    assert all(isinstance(error, NonFiniteError) for error in results), results
    assert all(str(error).startswith("step 1: the loss (micro-batch /") for error in results)
    assert call_all(ranks[1:2], "break_backward") == [None]
    results = call_all(ranks, "step", STEPS[1])
    assert {str(error) for error in results} == {
        "step 1: the gradient of embedding.weight is not finite; no update was made"
    }
    # The failed steps change nothing and leave no gradient to the next one.
    assert call_all(ranks, "digest") == before
    learn(ranks, STEPS[1:])
    assert_same_state(ranks, learn_alone(STEPS, settings)[0], sharded=sharded, exact=not sharded)


# Micro-batches (step and number) that each rank accumulates, and the passes left to the step.
HELD = {
    "some": ({0: [(1, 3), (1, 0)], 2: [(1, 1)]}, 2),
    "all on one rank": ({1: [(1, n) for n in (2, 0, 4, 1, 3)]}, 0),
    "one of another step": ({0: [(1, 0), (2, 0)], 1: [(1, 1)]}, 4),
    "one twice": ({0: [(1, 0)], 1: [(1, 2), (1, 0)], 2: [(1, 3)]}, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", HELD)
def test_what_was_accumulated_is_counted_once_wherever_it_was(ranks, case):
    steps = [replace(plan, names=f"step{plan.seed}") for plan in STEPS]
    single, expected = learn_alone(steps[:2], dtype=torch.float32)
    begin(ranks, dtype=torch.float32)
    learn(ranks, steps[:1])
    held, passes = HELD[case]
    for rank, micro_batches in held.items():
        for step, number in micro_batches:
            assert call_all([ranks[rank]], "accumulate", steps[step], number) == [None]
            call_all([ranks[rank]], "accumulate", steps[step], number)  # is not added again
    before = call_all(ranks, "num_passes")
    assert_same_reports(learn(ranks, steps[1:2]), expected[1:])
    after = call_all(ranks, "num_passes")
    assert sum(after) - sum(before) == passes
    assert_same_state(ranks, single)


@pytest.mark.slow
def test_what_survivors_accumulated_stays_and_the_rest_is_computed_again(ranks):
    steps = [replace(plan, names=f"step{plan.seed}") for plan in STEPS]
    fresh, doomed, survivors = RankProcess(), ranks[1], [ranks[0], ranks[2]]
    begin(ranks)
    learn(ranks, steps[:1])
    for rank, number in ((0, 3), (1, 1), (2, 0)):
        call_all([ranks[rank]], "accumulate", steps[1], number)
    doomed.end()
    ranks[1] = fresh
    connect(ranks)
    before = call_all(survivors, "num_passes")
    assert call_all(ranks[1:2], "die_after_passes", 0) == [None]  # in the step: nothing is kept
    for each in ranks:
        each.send("step", steps[1])
    assert all(isinstance(each.receive(), ProcessGroupError) for each in survivors)
    after = call_all(survivors, "num_passes")
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
    fresh.end()
    ranks[1] = RankProcess()
    connect(ranks)
    single, expected = learn_alone(steps)
    assert_same_reports(learn(ranks, steps[1:]), expected[1:])
    assert_same_state(ranks, single)


@pytest.mark.slow
@pytest.mark.parametrize(("dies", "timeout_s"), [(True, PATIENCE_S), (False, 5.0)])
def test_a_lost_or_late_shard_ends_the_run_with_a_remedy(ranks, dies, timeout_s):
    lost, survivors = ranks[1], [ranks[0], ranks[2]]
    assert call_all(ranks, "begin", SHARDED) == [None] * 3
    connect(ranks, timeout_s=timeout_s)
    learn(ranks, STEPS[:1])
    if dies:
        ranks[1] = RankProcess()
        assert call_all([lost], "die_after_passes", 0) == [None]
        lost.send("step", STEPS[1])
    for error in call_all(survivors, "step", STEPS[1]):
        assert isinstance(error, ProcessGroupError)
        assert "a collective of the shards failed: " in str(error)
    address = free_address()
    for rank, each in enumerate(survivors):
        each.send("connect", rank, 2, address, PATIENCE_S)
    for error in [each.receive() for each in survivors]:
        assert isinstance(error, ClusterError)
        assert "(learner.sharding); start again: the run resumes from its newest" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [(1, 2), (0, 1, 2)])
def test_ranks_that_missed_an_update_receive_it_when_they_connect_again(ranks, interrupted):
    steps = [replace(plan, mini_batches=2) for plan in STEPS]
    single, _ = learn_alone(steps)
    begin(ranks)
    learn(ranks, steps[:1])
    before = call_all(ranks, "digest")
    missing = [ranks[rank] for rank in interrupted]
    assert call_all(missing, "lose_group", 1) == [None] * len(missing)
    results = call_all(ranks, "step", steps[1])
    failed = [rank for rank, one in enumerate(results) if isinstance(one, ProcessGroupError)]
    assert failed == list(interrupted)
    assert call_all(missing, "digest") == [before[rank] for rank in interrupted]
    connect(ranks)
    was_made = len(interrupted) < len(ranks)
    assert state_of(ranks)[0] == {"version": 1 + was_made}
    learn(ranks, steps[1 + was_made :])
    assert_same_state(ranks, single)


def test_any_two_weights_have_different_digests():
    learner, twin = new_learner(), new_learner()
    assert learner.digest() == twin.digest()
    learner.step(STEPS[0].batches())
    after = learner.digest()
    assert after != twin.digest()
    weights = learner.learned()
    weights["norm.weight"].view(torch.int64)[3] ^= 1
    twin.restore(learner.state(), weights)
    assert twin.digest() != after
    tied = Learner(tiny_model("qwen2"), SETTINGS)
    assert Learner(tiny_model(), SETTINGS).digest() != tied.digest()
