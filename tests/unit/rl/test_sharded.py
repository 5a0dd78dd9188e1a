"""Members that hold a shard each learn what a single learner does, and give the whole back."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from longtail.errors import ClusterError, NonFiniteError, TeamError
from longtail.rl.learner import Learner, LearnerSettings
from longtail.rl.learner_metrics import LearnerReport
from support.team_members import (
    PATIENCE_S,
    SETTINGS,
    Member,
    Plan,
    arrays,
    ask,
    form,
    free_address,
    new_learner,
)

Arrays = dict[str, np.ndarray]
SHARDED = replace(SETTINGS, sharding="full")
STEPS = (Plan(seed=1), Plan(seed=2), Plan(seed=3))
SECONDS = ("logprob_seconds", "update_seconds")


@pytest.fixture(scope="module")
def crew() -> Iterator[list[Member]]:
    """Three processes without a team; each test lets them begin anew."""
    members = [Member() for _ in range(3)]
    yield members
    for member in members:
        member.end()


def begin(members: Sequence[Member], settings: LearnerSettings = SHARDED, **model: Any) -> None:
    """Make a team of learners that begin."""
    assert ask(members, "begin", settings, **model) == [None] * len(members)
    form(members)


def learn(members: Sequence[Member], steps: Sequence[Plan]) -> list[LearnerReport]:
    """Let the members make the steps; they report the same, and all know the weights then."""
    reports = []
    for plan in steps:
        said = ask(members, "step", plan)
        assert all(isinstance(one, LearnerReport) for one in said), said
        times = dict.fromkeys(SECONDS, 0.0)
        assert all(replace(one, **times) == replace(said[0], **times) for one in said)
        reports.append(said[0])
    return reports


def together(members: Sequence[Member]) -> tuple[Any, Arrays, Arrays]:
    """What the members hold: numbers, the rows of all moments, and the weights, which all have."""
    copies = ask(members, "copy")
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


def assert_are(members: Sequence[Member], learner: Learner) -> None:
    """The members together are this learner."""
    numbers, moments, weights = together(members)
    assert numbers == {"version": learner.version}
    assert_same(weights, arrays(learner.weights().tensors))
    assert_same(moments, arrays(learner.state().tensors))


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
        pytest.param({"head_dim": 4}, SHARDED, {"budget": 100}, id="empty-shards-idle-members"),
        pytest.param(
            {"family": "qwen2"},
            replace(SHARDED, recompute=True, max_logits=256, loss="gspo", kl_coef=0.0),
            {},
            id="all-computed-again",
        ),
    ],
)
def test_shards_learn_what_a_single_learner_does(crew, size, model, settings, plan):
    steps = [replace(each, **plan) for each in STEPS]
    single = new_learner(settings, **model)
    expected = [single.step(each.batches()) for each in steps]
    begin(crew[:size], settings, **model)
    reports = learn(crew[:size], steps)
    assert_are(crew[:size], single)
    for ours, theirs in zip(reports, expected, strict=True):
        for name, value in asdict(theirs).items():
            if name not in SECONDS:
                assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert reports[-1].grad_norm > 0.5, "clipping takes part"


@pytest.mark.parametrize("autocast", [False, True])
def test_shards_go_with_native_kernels_and_with_bfloat16_products(crew, autocast):
    settings = replace(SHARDED, autocast=autocast)
    single = new_learner(settings, dtype=torch.float32)
    begin(crew[:2], settings, dtype=torch.float32)
    for plan in STEPS:
        single.step(plan.batches())
    learn(crew[:2], STEPS)
    theirs = arrays(single.weights().tensors)
    for name, array in together(crew[:2])[2].items():
        # Sums in another order err by 2^-24 of a gradient each; updates are 0.05 of it at most.
        assert np.abs(array - theirs[name]).max() <= 1e-6, name


def test_a_step_without_anything_to_learn_from_decays_all_shards_alike(crew):
    idle = Plan(seed=4, idle=tuple(range(7)), keep_idle=False)
    assert not idle.batches()[0].micro_batches
    single = new_learner(SHARDED)
    begin(crew)
    for plan in (idle, STEPS[0]):
        single.step(plan.batches())
    learn(crew, (idle, STEPS[0]))
    assert_are(crew, single)


def test_what_is_not_finite_on_one_member_stops_all_of_them(crew):
    single = new_learner(SHARDED)
    begin(crew)
    learn(crew, STEPS[:1])
    before = ask(crew, "look")
    said = ask(crew, "step", replace(STEPS[1], bad_advantage=3))
    assert all(isinstance(error, NonFiniteError) for error in said), said
    assert sorted("micro-batch" in str(error) for error in said) == [False, False, True]
    assert ask(crew[1:2], "break_backward") == [None]
    said = ask(crew, "step", STEPS[1])
    assert {str(error) for error in said} == {
        "step 1: the gradient of embedding.weight is not finite; no update was made"
    }
    # Nothing was changed, and nothing of the failed steps is left in the next one.
    assert ask(crew, "look") == before
    learn(crew, STEPS[1:])
    for plan in STEPS:
        single.step(plan.batches())
    assert_are(crew, single)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2)])
def test_a_checkpoint_goes_on_with_any_number_of_shards_or_none(crew, before, after):
    """As close as the order of additions allows; what is restored has the same bits."""
    single = new_learner(SHARDED)
    for plan in STEPS:
        single.step(plan.batches())
    begin(crew[:before])
    learn(crew[:before], STEPS[:1])
    numbers, moments, weights = kept = together(crew[:before])
    assert ask(crew[:after], "begin", SHARDED) == [None] * after
    assert ask(crew[:after], "restore", *kept) == [None] * after
    form(crew[:after])
    found = together(crew[:after])
    assert found[0] == numbers
    for ours, theirs in zip(found[1:], (moments, weights), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())
    learn(crew[:after], STEPS[1:])
    assert_are(crew[:after], single)


@pytest.mark.parametrize("passes", [0, 1])
def test_shards_that_lost_a_member_end_the_learning_with_a_remedy(crew, passes):
    fresh, doomed = Member(), crew[1]
    begin(crew)
    learn(crew, STEPS[:1])
    assert ask([doomed], "die_after_passes", passes) == [None]
    for member in crew:
        member.tell("step", STEPS[1])
    survivors = [crew[0], crew[2]]
    said = [member.hear() for member in survivors]
    assert all(isinstance(error, TeamError) for error in said), said
    doomed.end()
    crew[1] = fresh
    address = free_address()
    for rank, member in enumerate(survivors):
        member.tell("form", rank, 2, address, PATIENCE_S)
    for error in [member.hear() for member in survivors]:
        assert isinstance(error, ClusterError)
        assert "(learner.sharding); start again: the run resumes from its newest" in str(error)
