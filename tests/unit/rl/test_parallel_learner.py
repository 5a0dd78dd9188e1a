"""A team of processes learns what a single learner learns; it fails together, and goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from longtail.errors import NonFiniteError, TeamError
from longtail.rl.learner import Learner
from longtail.rl.learner_metrics import LearnerReport
from support.team_members import (
    SETTINGS,
    Member,
    Plan,
    arrays,
    ask,
    form,
    new_learner,
)
from support.tiny_models import tiny_model

Copy = tuple[dict[str, int], dict[str, np.ndarray], dict[str, np.ndarray]]
"""Numbers, moments and weights, as they go through a pipe."""
STEPS = (Plan(seed=1), Plan(seed=2), Plan(seed=3))
SECONDS = ("logprob_seconds", "update_seconds")


@pytest.fixture(scope="module")
def crew() -> Iterator[list[Member]]:
    """Three processes without a team; each test lets them begin anew."""
    members = [Member() for _ in range(3)]
    yield members
    for member in members:
        member.end()


def alone(steps: Sequence[Plan]) -> tuple[Learner, list[LearnerReport]]:
    learner = new_learner()
    return learner, [learner.step(plan.batches()) for plan in steps]


def assert_same_weights(ours: dict[str, np.ndarray], learner: Learner) -> None:
    theirs = arrays(learner.weights().tensors)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        # 1e-12 of the largest weight: the order of additions is all that differs.
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def assert_same_moments(members: Sequence[Member], learner: Learner) -> None:
    theirs = arrays(learner.state().tensors)
    ours = agreed(members)[1]
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def form_anew(members: Sequence[Member]) -> None:
    """Make a team of learners that begin."""
    assert ask(members, "begin", SETTINGS) == [None] * len(members)
    form(members)


def assert_same_report(ours: LearnerReport, theirs: LearnerReport) -> None:
    assert all(asdict(one)[name] > 0 for one in (ours, theirs) for name in SECONDS)
    for name, value in asdict(theirs).items():
        if name not in SECONDS:
            assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def agreed(members: Sequence[Member]) -> Copy:
    """Return what all members hold, the same bits."""
    copies = ask(members, "copy")
    for other in copies[1:]:
        assert other[0] == copies[0][0]
        for ours, theirs in zip(other[1:], copies[0][1:], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(array, theirs[name]) for name, array in ours.items())
    found: Copy = copies[0]
    return found


def learn_together(
    members: Sequence[Member], steps: Sequence[Plan]
) -> tuple[dict[str, np.ndarray], list[LearnerReport]]:
    """Let the members make the steps; they agree in every bit, and in all they report."""
    reports = []
    for plan in steps:
        said = ask(members, "step", plan)
        assert all(isinstance(one, LearnerReport) for one in said), said
        times = dict.fromkeys(SECONDS, 0.0)
        assert all(replace(one, **times) == replace(said[0], **times) for one in said)
        reports.append(said[0])
    return agreed(members)[2], reports


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_team_learns_what_a_single_learner_does(crew, size, mini_batches):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    assert all(len(batch.micro_batches) > 1 for batch in steps[0].batches())
    single, expected = alone(steps)
    form_anew(crew[:size])
    weights, reports = learn_together(crew[:size], steps)
    assert_same_weights(weights, single)
    assert_same_moments(crew[:size], single)
    for ours, theirs in zip(reports, expected, strict=True):
        assert_same_report(ours, theirs)
    last = reports[-1]
    assert last.num_updates == mini_batches
    assert last.grad_norm > 0.5, "clipping takes part"
    assert 0 < last.capped_fraction < 1
    assert last.reference_kl > 0


def test_members_that_have_no_micro_batch_make_the_update_of_the_others(crew):
    steps = [replace(plan, budget=100, mini_batches=2) for plan in STEPS]
    assert all(len(batch.micro_batches) == 1 for batch in steps[0].batches())
    single, expected = alone(steps)
    form_anew(crew)
    weights, reports = learn_together(crew, steps)
    assert_same_weights(weights, single)
    for ours, theirs in zip(reports, expected, strict=True):
        assert_same_report(ours, theirs)


@pytest.mark.parametrize("broken", [{"bad_advantage": 3}, {"bad_logprob": 5}])
def test_a_loss_that_is_not_finite_on_one_member_stops_all_of_them(crew, broken):
    form_anew(crew)
    learn_together(crew, STEPS[:1])
    before = ask(crew, "look")
    said = ask(crew, "step", replace(STEPS[1], **broken))
    assert all(isinstance(error, NonFiniteError) for error in said), said
    own = [str(error) for error in said if "micro-batch" in str(error)]
    others = [str(error) for error in said if "members [" in str(error)]
    assert (len(own), len(others)) == (1, 2)
    assert all(text.startswith("step 1: the loss") for text in (*own, *others))
    assert ask(crew, "look") == before
    # Nothing of the failed step is left in the next one.
    weights, _ = learn_together(crew, STEPS[1:])
    assert_same_weights(weights, alone(STEPS)[0])


def test_a_gradient_that_is_not_finite_on_one_member_stops_all_of_them(crew):
    form_anew(crew)
    before = ask(crew, "look")
    crew[2].tell("break_gradients")
    assert crew[2].hear() is None
    said = ask(crew, "step", STEPS[0])
    assert {str(error) for error in said} == {
        "step 0: the gradient of layers.0.attention.qkv.weight is not finite; no update was made"
    }
    assert ask(crew, "look") == before
    weights, _ = learn_together(crew, STEPS)
    assert_same_weights(weights, alone(STEPS)[0])


@pytest.mark.parametrize(
    ("mini_batches", "backwards"),
    [
        pytest.param(1, 0, id="before-the-sum"),
        pytest.param(2, 1, id="between-two-updates"),
    ],
)
def test_a_step_that_lost_a_member_changes_nothing_and_can_be_made_again(
    crew, mini_batches, backwards
):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    fresh, doomed, survivors = Member(), crew[1], [crew[0], crew[2]]
    form_anew(crew)
    learn_together(crew, steps[:1])
    before = ask(survivors, "look")
    doomed.tell("die_after", backwards)
    assert doomed.hear() is None
    for member in crew:
        member.tell("step", steps[1])
    said = [member.hear() for member in survivors]
    assert all(isinstance(error, TeamError) for error in said), said
    assert all("waited in vain for the sum of" in str(error) for error in said)
    with pytest.raises(EOFError):
        doomed.hear()
    assert ask(survivors, "look") == before

    doomed.end()
    crew[1] = fresh  # it comes with the initial weights, which are the reference
    if mini_batches == 2:  # it may know what a colleague does, or nothing
        crew[0].tell("copy")
        fresh.tell("restore", *crew[0].hear())
        assert fresh.hear() is None
    form(crew)
    weights, reports = learn_together(crew, steps[1:])
    single, expected = alone(steps)
    assert_same_weights(weights, single)
    assert_same_moments(crew, single)
    assert_same_report(reports[-1], expected[-1])


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("blind", [(1, 2), (0, 1, 2)])
def test_who_made_a_step_unseen_has_the_others_make_it_when_they_meet_again(
    crew, mini_batches, blind
):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    single, _ = alone(steps)
    form_anew(crew)
    learn_together(crew, steps[:1])
    before = ask(crew, "look")
    assert ask([crew[rank] for rank in blind], "lose_sight") == [None] * len(blind)
    said = ask(crew, "step", steps[1])
    assert [isinstance(one, TeamError) for one in said] == [rank in blind for rank in range(3)]
    assert [ask(crew, "look")[rank] for rank in blind] == [before[rank] for rank in blind]
    form(crew)
    was_made = len(blind) < 3
    assert agreed(crew)[0] == {"version": 1 + was_made}
    weights, _ = learn_together(crew, steps[1 + was_made :])
    assert_same_weights(weights, single)
    assert_same_moments(crew, single)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_a_team_of_another_size_goes_on_from_a_checkpoint(crew, before, after):
    single, _ = alone(STEPS)
    form_anew(crew[:before])
    learn_together(crew[:before], STEPS[:1])
    kept = agreed(crew[:before])
    form_anew(crew[:after])
    assert ask(crew[:after], "restore", *kept) == [None] * after
    weights, _ = learn_together(crew[:after], STEPS[1:])
    assert_same_weights(weights, single)
    assert_same_moments(crew[:after], single)


def test_the_digest_tells_any_two_weights_apart():
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
