"""A team of processes learns what a single learner learns; it fails together, and goes on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from longtail.errors import ClusterError, NonFiniteError, TeamError
from longtail.rl.learner import Learner
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


def assert_same_moments(members: Sequence[Member], learner: Learner, copies: int) -> None:
    """Each is held by so many members, and is the single learner's."""
    theirs = arrays(learner.state().tensors)
    held = Counter(name for _, moments, _ in ask(members, "copy") for name in moments)
    assert held == dict.fromkeys(theirs, min(copies, len(members)))
    for name, array in agreed(members)[1].items():
        assert np.abs(array - theirs[name]).max() <= 1e-12 * np.abs(theirs[name]).max(), name


def begin(member: Member, copies: int) -> None:
    member.tell("begin", replace(SETTINGS, moment_copies=copies))
    assert member.hear() is None


def form_anew(members: Sequence[Member], copies: int) -> None:
    """Make a team of learners that begin."""
    for member in members:
        begin(member, copies)
    form(members)


def assert_same_report(ours: LearnerReport, theirs: LearnerReport) -> None:
    assert all(asdict(one)[name] > 0 for one in (ours, theirs) for name in SECONDS)
    for name, value in asdict(theirs).items():
        if name not in SECONDS:
            assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


def agreed(members: Sequence[Member]) -> Copy:
    """What the members hold together; whoever holds the same thing holds the same bits."""
    copies = ask(members, "copy")
    numbers, moments, weights = copies[0]
    for other_numbers, others, other_weights in copies[1:]:
        assert other_numbers == numbers
        assert other_weights.keys() == weights.keys()
        assert all(np.array_equal(array, weights[name]) for name, array in other_weights.items())
        shared = moments.keys() & others.keys()
        assert all(np.array_equal(moments[name], others[name]) for name in shared)
        moments |= others
    return numbers, moments, weights


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
        assert ask(members, "gather") == [None] * len(members)
    return agreed(members)[2], reports


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_team_learns_what_a_single_learner_does(crew, size, mini_batches, copies):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    assert all(len(batch.micro_batches) > 1 for batch in steps[0].batches())
    single, expected = alone(steps)
    form_anew(crew[:size], copies)
    weights, reports = learn_together(crew[:size], steps)
    assert_same_weights(weights, single)
    assert_same_moments(crew[:size], single, copies or size)
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
    form_anew(crew, 0)
    weights, reports = learn_together(crew, steps)
    assert_same_weights(weights, single)
    for ours, theirs in zip(reports, expected, strict=True):
        assert_same_report(ours, theirs)


@pytest.mark.parametrize("broken", [{"bad_advantage": 3}, {"bad_logprob": 5}])
def test_a_loss_that_is_not_finite_on_one_member_stops_all_of_them(crew, broken):
    form_anew(crew, 0)
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
    form_anew(crew, 0)
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
@pytest.mark.parametrize("copies", [0, 2])
def test_a_step_that_lost_a_member_changes_nothing_and_can_be_made_again(
    crew, mini_batches, backwards, copies
):
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    fresh, doomed, survivors = Member(), crew[1], [crew[0], crew[2]]
    form_anew(crew, copies)
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
    begin(fresh, copies)
    if mini_batches == 2:  # it may know what a colleague does, or nothing
        crew[0].tell("copy")
        fresh.tell("restore", *crew[0].hear(), True)
        assert fresh.hear() is None
    form(crew)
    weights, reports = learn_together(crew, steps[1:])
    single, expected = alone(steps)
    assert_same_weights(weights, single)
    assert_same_moments(crew, single, copies or 3)
    assert_same_report(reports[-1], expected[-1])


@pytest.mark.parametrize("mini_batches", [1, 2])
@pytest.mark.parametrize("blind", [(1, 2), (0, 1, 2)])
def test_who_made_a_step_unseen_has_the_others_make_it_when_they_meet_again(
    crew, mini_batches, blind
):
    # With (1, 2) member 0 makes it, and some moments are kept by 1 and 2 only: who lost sight of
    # the team before its own update must make that up, not be given the result.
    steps = [replace(plan, mini_batches=mini_batches) for plan in STEPS]
    single, _ = alone(steps)
    form_anew(crew, 2)
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
    assert_same_moments(crew, single, 2)


def test_a_member_lost_between_the_update_and_the_gathering_takes_nothing_with_it(crew):
    fresh, survivors = Member(), crew[1:]
    single, _ = alone(STEPS)
    form_anew(crew, 2)
    learn_together(crew, STEPS[:1])
    assert all(isinstance(one, LearnerReport) for one in ask(crew, "step", STEPS[1]))
    crew[0].end()
    assert all(isinstance(error, TeamError) for error in ask(survivors, "gather"))
    crew[0] = fresh
    begin(fresh, 2)
    form(crew)
    assert agreed(crew)[0] == {"version": 2}
    weights, _ = learn_together(crew, STEPS[2:])
    assert_same_weights(weights, single)
    assert_same_moments(crew, single, 2)


def test_moments_that_nobody_kept_any_more_end_the_learning_with_a_remedy(crew):
    form_anew(crew, 1)
    learn_together(crew, STEPS[:1])
    begin(crew[1], 1)  # as a new process would
    address = free_address()
    for rank, member in enumerate(crew):
        member.tell("form", rank, 3, address, PATIENCE_S)
    for error in [member.hear() for member in crew]:
        assert isinstance(error, ClusterError)
        assert "(learner.moment_copies); start again" in str(error)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1)])
def test_what_some_kept_is_taken_up_by_a_team_of_another_size(crew, before, after):
    single, _ = alone(STEPS)
    form_anew(crew[:before], 2)
    learn_together(crew[:before], STEPS[:1])
    kept = agreed(crew[:before])
    form_anew(crew[:after], 1)
    assert ask(crew[:after], "restore", *kept, False) == [None] * after
    weights, _ = learn_together(crew[:after], STEPS[1:])
    assert_same_weights(weights, single)
    assert_same_moments(crew[:after], single, 1)


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
