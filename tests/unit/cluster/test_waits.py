"""Every wait of the cluster ends if the workers that it waits for die; in simulated time.

test_law10_workers.py lets processes die at any time; here, every worker dies of the same task. A
wait that does not end fails an assertion of the simulated clock.
"""

from pathlib import Path

import pytest

from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker_pool import MAX_LOSSES
from longtail.errors import ClusterError
from longtail.rl.learner import LearnerState
from longtail.system.interrupt import Interrupted
from support.fake_worker import Death, Fault, SpotScript
from support.scripted_pool import ScriptedPool, batch, begun, requests

AGAIN_AND_AGAIN = r"\d workers were lost in a row.* start again: the run resumes"
ALL_LOST = r"all workers are lost, and the policy with them; start again: the run resumes"
FAILED = r"a learner step failed \d times; start again: the run resumes"


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
        group.rollout(step, requests(30, 9, 9, 9))  # a drafter is measured, not yet offered
        group.train_drafter()
        group.learn([batch(step)])
        group.publish()
        group.offer_drafter()
        group.save_policy(place / "policy")
        group.learner_state()


TASKS = (
    *("ready", "drafter", "publish", "restore_saved", "generate"),
    *("adopt", "learn", "join", "save_policy", "learner_state"),
)
STEPS_ALL_AND_ONE = ("generate", "learn", "publish", "drafter")
"""A task in steps, one of the team, one of every worker and one of the first."""


@pytest.mark.parametrize(
    ("task", "kind"),
    [*((task, "lost") for task in TASKS), *((task, "frozen") for task in STEPS_ALL_AND_ONE)],
)
def test_a_task_that_kills_every_worker_ends_the_run_with_a_remedy(task, kind, tmp_path):
    deadly = [Fault(worker=f.worker, task=task, nth=f.nth, kind=kind) for f in always(task)]
    with pytest.raises(ClusterError, match="|".join((AGAIN_AND_AGAIN, ALL_LOST, FAILED))):
        a_run(begun(ScriptedPool(2, faults=deadly, limit_s=20_000.0)), tmp_path)


@pytest.mark.parametrize("task", ["ready", "continue_run"])
def test_new_workers_that_die_while_they_start_end_the_run(task, tmp_path):
    # The first worker is lost, and no new one in its place becomes idle.
    first = {"ready": 2, "continue_run": 0}[task]
    deadly = [fault for fault in always(task, first) if fault.worker == 0]
    pool = ScriptedPool(2, faults=[Fault(worker=0, task="learn"), *deadly])
    with pytest.raises(ClusterError, match=AGAIN_AND_AGAIN):
        a_run(begun(pool), tmp_path)
    assert pool.births == [MAX_LOSSES, 0]


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
