"""Every wait of the cluster ends if the workers that it waits for die; in simulated time.

    wait                                                 waits for
    WorkerSupervisor.wait_ready   at the beginning       all workers
                                  later                  new workers: ready, policy, publish
                                  without a policy       an idle worker, which has no task to end
    WorkerSupervisor.run          learn, join, ...       the workers of the task
    WorkerSupervisor.abandon      an interruption        workers that generate and train
    WorkerSupervisor.ask          any answer             one worker
    RolloutCoordinator.run        shards                 workers that generate
                                  the end of training    workers that train
    LearnerTeam                   a meeting point        the first worker

A wait that does not end fails an assertion of the simulated clock.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress
from longtail.cluster.states import State
from longtail.cluster.supervisor import MAX_LOSSES, STOP_S
from longtail.errors import ClusterError
from longtail.rl.learner import LearnerState
from longtail.system.interrupt import Interrupted
from support.fake_worker import READY_S, WORKER_TIMEOUT_S, Death, Fault, SpotScript, text
from support.scripted_pool import ScriptedPool, batch, begun, requests

AGAIN_AND_AGAIN = r"\d workers were lost in a row.* start again: the run resumes"
ALL_LOST = r"all workers are lost, and the policy with them; start again: the run resumes"
FAILED = r"a learner step failed \d times; start again: the run resumes"
NEVER_MET = "the workers cannot find each other"


def always(task: str, first: int = 0, after_s: float = 0.0) -> list[Fault]:
    """Return faults that kill every worker that does a task."""
    return [
        Fault(worker=worker, task=task, nth=nth, after_s=after_s)
        for worker in range(2)
        for nth in range(first, 30)
    ]


def a_run(group: WorkerGroup, place: Path) -> None:
    """Run every task of a training run."""
    group.restore(place, LearnerState(tensors={}, numbers={"version": 0}))
    for step in (1, 2):
        group.rollout(step, requests(40, 9, 9, 9))
        group.train_drafter()
        group.learn([batch(step)])
        group.publish()
        group.offer_drafter()
        group.save_policy(place / "policy")
        group.learner_state()


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        *("ready", "num_parameters", "drafter_weights", "publish", "restore_saved", "generate"),
        *("adopt", "learn", "join", "save_policy", "learner_state"),
    ],
)
@pytest.mark.parametrize("kind", ["lost", "frozen"])
def test_a_task_that_kills_every_worker_ends_the_run_with_a_remedy(task, kind, tmp_path):
    deadly = [Fault(worker=f.worker, task=task, nth=f.nth, kind=kind) for f in always(task)]
    with pytest.raises(ClusterError, match="|".join((AGAIN_AND_AGAIN, ALL_LOST, FAILED))):
        a_run(begun(ScriptedPool(2, faults=deadly, limit_s=20_000.0)), tmp_path)


@pytest.mark.parametrize("task", ["ready", "restore", "publish"])
def test_new_workers_that_die_while_they_start_end_the_run(task, tmp_path):
    # The first worker is lost, and no new one in its place becomes idle.
    first = {"ready": 2, "restore": 0, "publish": 1}[task]
    deadly = [fault for fault in always(task, first) if fault.worker == 0]
    pool = ScriptedPool(2, faults=[Fault(worker=0, task="learn"), *deadly])
    with pytest.raises(ClusterError, match=AGAIN_AND_AGAIN):
        a_run(begun(pool), tmp_path)
    assert pool.births == [MAX_LOSSES, 0]


@pytest.mark.parametrize("kind", ["lost", "frozen"])
def test_a_worker_lost_before_it_copied_its_policy_ends_the_run_with_a_remedy(kind):
    # It is idle while the new worker starts, so no task of it will end.
    pool = ScriptedPool(2)
    group = begun(pool, "never")
    group.rollout(1, requests(9, 9))
    pool.kill(0)
    pool.schedule(Death(worker=1, at_s=pool.clock.now + READY_S / 2, kind=kind))
    began = pool.clock.now
    with pytest.raises(ClusterError, match=ALL_LOST):
        group.learn([batch(1)])
    assert pool.births == [1, 1]
    assert pool.clock.now - began < READY_S + 2 * WORKER_TIMEOUT_S
    how = (
        "worker 1 is gone"
        if kind == "lost"
        else f"has not handed on the policy for {WORKER_TIMEOUT_S:.0f}"
    )
    assert how in pool.log_lines[-1]


def test_a_third_worker_copies_its_policy_in_place_of_a_lost_one():
    pool = ScriptedPool(3)
    group = begun(pool, "never")
    group.rollout(1, requests(9, 9, 9))
    pool.kill(0)
    pool.schedule(Death(worker=1, at_s=pool.clock.now + READY_S / 2))
    assert group.learn([batch(1)]).version == 1
    assert [each.policy for each in pool.workers] == [(1,)] * 3
    assert pool.births == [1, 1, 0]


def test_the_death_of_all_busy_workers_ends_the_rollout():
    pool = ScriptedPool(3)
    group = begun(pool)
    for worker in range(3):
        pool.schedule(Death(worker=worker, at_s=pool.clock.now + 5.0))
    with pytest.raises(ClusterError, match=ALL_LOST):
        group.rollout(1, requests(90, 9, 9))
    assert {name for when, _, name in pool.started if when > 4.0} >= {"train_drafter", "generate"}


@pytest.mark.parametrize("kind", ["lost", "frozen"])
def test_a_rollout_does_not_wait_for_spot_workers_that_die_while_they_stop(kind):
    pool = ScriptedPool(3, spot_scripts=lambda worker, nth: SpotScript(stop_s=5.0))
    group, asked = begun(pool), requests(90, 9, 9)
    for worker in (1, 2):
        pool.schedule(Death(worker=worker, at_s=pool.clock.now + 10.0, kind=kind))
    rolled = group.rollout(1, asked)
    assert [each.tokens for each in rolled.completions] == [text(each) for each in asked]
    assert rolled.stop_s < STOP_S + 1.0 + len(requests(1, 1)) * 0.1
    assert group.learn([batch(1)]).version == 1


@pytest.mark.parametrize("kind", ["lost", "frozen"])
def test_abandoning_a_rollout_ends_if_all_workers_die(kind, tmp_path):
    def interrupt(progress: Progress) -> None:
        if progress.num_generated > 60:
            raise Interrupted

    pool = ScriptedPool(2, spot_scripts=lambda worker, nth: SpotScript(stop_s=5.0))
    group = begun(pool, on_progress=interrupt)
    with pytest.raises(Interrupted):
        group.rollout(1, requests(90, 9))
    for worker in range(2):
        pool.schedule(Death(worker=worker, at_s=pool.clock.now, kind=kind))
    group.abandon()
    assert not group.workers(State.GENERATING, State.SPOT)
    with pytest.raises(ClusterError, match=ALL_LOST):
        group.save_policy(tmp_path / "policy")


def test_serial_training_that_dies_repeatedly_delays_no_step():
    pool = ScriptedPool(2, faults=always("train_drafter", after_s=0.3))
    group = begun(pool, "serial")
    group.rollout(1, requests(90, 9))
    group.train_drafter()
    group.learn([batch(1)])
    group.offer_drafter()
    assert group.learn([batch(2)]).version == 2
    assert pool.births == [1, 0]


def test_a_first_worker_that_dies_at_every_meeting_ends_the_run():
    pool = ScriptedPool(2)

    rendezvous_address = pool.rendezvous_address

    def nowhere() -> str:
        pool.kill(0)
        return rendezvous_address()

    pool.rendezvous_address = nowhere  # type: ignore[method-assign]

    with pytest.raises(ClusterError, match=NEVER_MET):
        begun(pool).learn([batch(1)])


MESSAGES: Sequence[str] = (
    "clear_stop",
    "stop",
    "texts",
    "add_texts",
    "offer",
    "drain_adopted",
    "candidate",
)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_death_noticed_in_place_of_an_answer_is_counted_as_a_loss(message):
    pool = ScriptedPool(3)
    group, asked = begun(pool), requests(90, 9, 9)
    killed: list[int] = []
    ask = pool.ask

    def deadly(worker: int, wanted: Callable[..., object], *args: object) -> object:
        if wanted.__name__ == message and not killed:
            killed.append(worker)
            pool.kill(worker)
        return ask(worker, wanted, *args)

    pool.ask = deadly  # type: ignore[method-assign]
    for step in (1, 2):
        rolled = group.rollout(step, asked)
        group.train_drafter()
        assert [each.tokens for each in rolled.completions] == [text(each) for each in asked]
        group.learn([batch(step)])
        group.publish()
        group.offer_drafter()
    assert len(killed) == 1
    assert sum(pool.births) == 1
    assert len([line for line in pool.log_lines if re.search("it is replaced", line)]) == 1
