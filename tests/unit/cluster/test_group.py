"""All workers as one, in simulated time: a step is made once, whichever worker is lost."""

from dataclasses import replace

import pytest
import torch

from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker_pool import READY_S
from longtail.errors import CheckpointError, ClusterError, NonFiniteError
from support.fake_worker import VOCABULARY, Fault
from support.scripted_pool import ScriptedPool, batch, begun, requests


def assert_learned(pool: ScriptedPool, *learned: int) -> None:
    """Assert that every worker has learned just these batches, once and in order."""
    assert [each.policy for each in pool.workers] == [learned] * pool.size


# ---- learning


@pytest.mark.parametrize("kind", ["hangs", "frozen"])
def test_a_worker_that_hangs_while_saving_is_replaced_after_the_ready_timeout(kind, tmp_path):
    pool = ScriptedPool(2, faults=[Fault(worker=0, task="save_policy", kind=kind)])
    group = begun(pool)
    group.learn([batch(1)])
    began = pool.clock.now
    group.save_policy(tmp_path / "policy")
    assert (tmp_path / "policy").read_text() == "(1,)"
    assert READY_S < pool.clock.now - began < READY_S + 20.0


def test_a_worker_that_computes_for_a_broken_team_is_not_late():
    # The new worker, long ready, waits for the policy.
    pool = ScriptedPool(3, learn_s=1.5 * READY_S, faults=[Fault(worker=1, task="learn")])
    begun(pool).learn([batch(1)])
    assert_learned(pool, 1)
    assert pool.births == [0, 1, 0]


def test_a_loss_that_is_not_finite_is_raised_and_nothing_is_updated():
    pool = ScriptedPool(3, broken_steps=(2,))
    group = begun(pool)
    group.learn([batch(1)])
    with pytest.raises(NonFiniteError, match="batch 2"):
        group.learn([batch(2)])
    assert_learned(pool, 1)
    assert group.workers(State.IDLE) == [0, 1, 2]


def test_a_step_that_fails_repeatedly_ends_the_run():
    pool = ScriptedPool(3, faults=[Fault(worker=1, task="learn", nth=nth) for nth in range(9)])
    with pytest.raises(ClusterError, match=r"failed 4 times; start again: the run resumes"):
        begun(pool).learn([batch(1)])
    assert {each.policy for each in pool.workers} == {()}


# ---- meeting


def test_a_team_that_cannot_be_formed_ends_the_run():
    pool = ScriptedPool(2, bad_meetings=99)
    with pytest.raises(ClusterError, match="cannot find each other; see that they share"):
        begun(pool).learn([batch(1)])


# ---- everything else that all do


@pytest.mark.parametrize("task", ["drafter", "save_policy"])
def test_a_task_of_the_first_worker_is_done_again_if_it_is_lost(task, tmp_path):
    pool = ScriptedPool(2, faults=[Fault(worker=0, task=task)])
    group = begun(pool)
    group.learn([batch(1)])
    group.save_policy(tmp_path / "policy")
    assert (tmp_path / "policy").read_text() == "(1,)"
    assert group.drafter is not None
    assert pool.births == [1, 0]


def test_stopped_spot_training_does_not_reset_the_count_of_losses():
    # The others train, are fetched back, and die of the request in their turn.
    faults = [
        Fault(worker=worker, task="generate", nth=nth, after_s=3.0)
        for worker in range(3)
        for nth in range(1, 40)
    ]
    pool = ScriptedPool(3, faults=faults)
    group = begun(pool)
    group.rollout(1, requests(9, 9, 9))
    with pytest.raises(ClusterError, match="were lost in a row"):
        group.rollout(2, requests(90, first=5))


def test_the_loss_of_the_only_worker_ends_the_run_with_a_remedy():
    pool = ScriptedPool(1, faults=[Fault(worker=0, task="generate", after_s=1.0)])
    with pytest.raises(ClusterError, match=r"the only worker is lost \(.*\); start again"):
        begun(pool).rollout(1, requests(30))


def test_a_lost_worker_ends_a_sharded_run_with_a_remedy():
    pool = ScriptedPool(3, faults=[Fault(worker=1, task="learn")])
    group = begun(pool, is_sharded=True)
    with pytest.raises(ClusterError, match=r"shard .* \(learner.sharding\) is lost \(.*\); start"):
        group.learn([batch(1)])
    assert pool.births == [0, 0, 0]


# ---- state


def test_the_learner_state_is_copied_again_after_the_copying_worker_is_lost():
    pool = ScriptedPool(3, faults=[Fault(worker=0, task="learner_state")])
    group = begun(pool)
    group.learn([batch(1)])
    state = group.learner_state()
    assert state.numbers == {"version": 1}
    assert state.tensors["rows"].tolist() == [0], "replicated: one worker has everything"
    # The worker in its place first receives the policy from the others.
    assert len(pool.meetings) == 2
    assert [worker for _, worker in pool.starts("learner_state")] == [0, 0, 0]


def test_the_learner_state_of_shards_is_their_rows_in_order():
    group = begun(ScriptedPool(3), is_sharded=True)
    group.learn([batch(1)])
    state = group.learner_state()
    assert state.tensors["rows"].tolist() == [0, 1, 2]
    assert state.tensors["step"].item() == 0
    assert state.numbers == {"version": 1}


def test_a_drafter_of_another_shape_is_refused():
    pool = ScriptedPool(1)
    group = begun(pool)
    group.rollout(1, requests(10))
    state = group.drafter_state()
    assert state is not None
    weight, before = state.tensors["drafter/w"], group.drafter.versions.published
    for change in (
        {"tensors": {**state.tensors, "drafter/more": weight}},
        {"tensors": {**state.tensors, "drafter/w": weight[None]}},
        {"tensors": {**state.tensors, "drafter/w": weight.long()}},
        {"tensors": {**state.tensors, "drafter/draft_ids": torch.tensor([0, VOCABULARY])}},
        {"numbers": {}},
        {"numbers": {**state.numbers, "version": "new"}},
    ):
        with pytest.raises(CheckpointError):
            group.restore_drafter(replace(state, **change))
        assert group.drafter.versions.published is before
