"""Members that hold a shard each learn what a single learner does, and give the whole back."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from longtail.errors import ClusterError, NonFiniteError, TeamError
from longtail.rl.learner import Learner
from longtail.rl.tally import LearnerReport
from team_members import PATIENCE_S, SETTINGS, Member, Plan, arrays, ask, form, new_learner
from team_members import free_address

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


def begin(members: Sequence[Member], settings: Any = SHARDED, family: str = "qwen3") -> None:
    """Make a team of learners that begin."""
    assert ask(members, "begin", settings, family) == [None] * len(members)
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
        assert ask(members, "gather") == [None] * len(members)
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
    ("family", "settings", "plan"),
    [
        pytest.param("qwen3", SHARDED, {}, id="uneven-deals"),
        pytest.param("qwen2", SHARDED, {"mini_batches": 2}, id="tied-and-two-updates"),
        pytest.param("qwen3", SHARDED, {"budget": 100}, id="one-micro-batch-for-all"),
        pytest.param(
            "qwen2",
            replace(SHARDED, recompute=True, max_logits=256, loss="gspo", kl_coef=0.0),
            {},
            id="everything-computed-again",
        ),
    ],
)
def test_shards_learn_what_a_single_learner_does(crew, size, family, settings, plan):
    steps = [replace(each, **plan) for each in STEPS]
    single = new_learner(settings, family)
    expected = [single.step(each.batches()) for each in steps]
    begin(crew[:size], settings, family)
    reports = learn(crew[:size], steps)
    assert_are(crew[:size], single)
    for ours, theirs in zip(reports, expected, strict=True):
        for name, value in asdict(theirs).items():
            if name not in SECONDS:
                assert asdict(ours)[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert reports[-1].grad_norm > 0.5, "clipping takes part"
