"""Several workers on Ray write and learn what one does, also when workers are killed.

In float64, where the sums of shards are one worker's as far as texts can tell.
"""

import os
import signal
from typing import Any

import numpy as np
import pytest

from end_to_end import processes
from end_to_end.workshop import EXACT, Workshop, build, save_untaught
from longtail.cluster import coordinator
from longtail.cluster.timeline import event_of
from longtail.cluster.workers.states import State
from longtail.cluster.workers.supervisor import WorkerSupervisor
from longtail.cluster.workers.worker import Worker
from longtail.errors import ClusterError, LostWorkerError
from support import moves

pytest.importorskip("ray")

from ray.exceptions import ObjectStoreFullError

from longtail.cluster.workers.ray import instance as own_ray
from longtail.cluster.workers.ray import pool as ray_pool

pytestmark = pytest.mark.slow
WORDS = (*EXACT, "--speculation.drafter=fresh+history")
TWO = ("--cluster.workers=2", "--cluster.worker_timeout_s=40")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes begin on two busy cores."""
    monkeypatch.setattr(processes, "PATIENCE_S", 300.0)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A workshop with the run `one`: four steps of one worker."""
    workshop = build(tmp_path_factory.mktemp("cluster"))
    assert workshop.train("one", "--run.steps=4", *WORDS).code == 0
    return workshop


def test_one_worker_and_two_shards_resume_from_each_other_and_write_what_one_does(
    workshop, tmp_path
):
    """One worker makes step 1, two with shards make steps 2 and 3, one makes step 4."""
    log, words = tmp_path / "log", ("--learner.sharding=full", *WORDS)
    assert workshop.train("shards", "--run.steps=1", *words).code == 0
    process = processes.start(workshop.words("shards", "--run.steps=3", *words, *TWO), log)
    assert processes.finish(process) == 0, log.read_text()
    trace = (workshop.path / "shards" / "trace.json").read_bytes().splitlines(keepends=True)
    workers = {event_of(line)["tid"] for line in trace[1:]}
    assert workers == {0, 1}
    assert workshop.train("shards", "--run.steps=4", *words).code == 0
    assert workshop.texts("shards") == workshop.texts("one")
    assert workshop.drafter("shards", 4) == workshop.drafter("one", 4) is not None


UNEVEN = ("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=150")
"""A worker decodes two at a time, and one has twice as many requests: the other becomes idle."""


def test_workers_killed_while_they_train_the_drafter_or_publish_change_no_text(
    workshop, monkeypatch
):
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = ("--run.steps=3", *WORDS, f"--speculation.drafter={drafter}", *UNEVEN)
    assert workshop.train("calm", *words, "--spot.train=never").code == 0
    assert workshop.train("deadly", *words, "--run.steps=1").code == 0  # two workers go on with it
    fatal = {Worker.train_drafter: 1, Worker.publish: 4}
    """Start of each task, counted over both workers, that kills its worker: in steps 2 and 3.

    tests/chaos kills workers as they generate and learn.
    """
    start = WorkerSupervisor.start

    def deadly(supervisor: WorkerSupervisor, worker: int, task: Any, *args: Any) -> None:
        start(supervisor, worker, task, *args)
        if task in fatal:
            fatal[task] -= 1
            if fatal[task] == 0:
                os.kill(supervisor.ask(worker, lambda own: os.getpid()), signal.SIGKILL)

    monkeypatch.setattr(WorkerSupervisor, "start", deadly)
    said = workshop.train("deadly", *words, *TWO)
    assert said.code == 0
    assert all(begins <= 0 for begins in fatal.values()), fatal
    assert said.err.count("it is replaced") == 2
    assert workshop.texts("deadly") == workshop.texts("calm")


def test_requests_that_move_and_workers_killed_meanwhile_change_no_bit(workshop, monkeypatch):
    """In float32: a worker is killed as it learns ahead, another as it hands requests over."""
    words = ("--run.steps=3", "--speculation.drafter=fresh+history", *UNEVEN)
    assert workshop.train("whole", *words).code == 0
    monkeypatch.setattr(coordinator, "_SHARE_S", moves.SHARE_S)
    monkeypatch.setattr(coordinator, "best_move", moves.half_of_the_most)
    left = {"ahead": 2, "release": 3}
    """Number of the micro-batch and of the move that kill their worker."""
    start, tell = WorkerSupervisor.start, WorkerSupervisor.tell

    def kill(supervisor: WorkerSupervisor, worker: int, what: str) -> None:
        processes = [supervisor.ask(each, lambda own: os.getpid()) for each in (0, 1)]
        if supervisor.workers(State.STARTING) or None in processes:
            return  # with both workers the policy would be lost
        left[what] -= 1
        if left[what] == 0:
            os.kill(processes[worker], signal.SIGKILL)

    def deadly_start(supervisor: WorkerSupervisor, worker: int, task: Any, *args: Any) -> None:
        start(supervisor, worker, task, *args)
        if task is Worker.accumulate:
            kill(supervisor, worker, "ahead")

    def deadly_tell(supervisor: WorkerSupervisor, worker: int, message: Any, *args: Any) -> bool:
        told = tell(supervisor, worker, message, *args)
        if message is Worker.release:
            kill(supervisor, worker, "release")
        return told

    monkeypatch.setattr(WorkerSupervisor, "start", deadly_start)
    monkeypatch.setattr(WorkerSupervisor, "tell", deadly_tell)
    said = workshop.train("moved", *words, *TWO)
    assert said.code == 0, said.err
    assert all(count <= 0 for count in left.values()), left
    assert said.err.count("it is replaced") == 2
    assert workshop.texts("moved") == workshop.texts("whole")
    weights = [workshop.policy(run, 3) / "model.safetensors" for run in ("moved", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert workshop.drafter("moved", 3) == workshop.drafter("whole", 3) is not None


def test_a_dead_worker_and_a_full_object_store_are_reported_and_cost_a_worker_at_most(monkeypatch):
    def raise_store_full(worker: Worker) -> None:
        raise ObjectStoreFullError("no room is left")

    def ask(worker: int, message: Any) -> Any:
        answer = pool.answers(message, {worker: ()})[worker]
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    def errors(count: int) -> list[Exception | None]:
        return [ended.error for _ in range(count) for ended in pool.wait(60.0)]

    monkeypatch.setattr(own_ray, "STORE_BYTES", 80 * 2**20)
    pool = ray_pool.RayWorkerPool(lambda number: None, 2)  # only the processes matter
    try:
        assert errors(2) == [None, None]
        sent = np.arange(25_000_000, dtype=np.float32)  # two transfers of 100 MB at once
        for worker in range(2):
            pool.start(worker, lambda own, data: data.copy(), sent + worker)
        received = {ended.worker: ended.value() for _ in range(2) for ended in pool.wait(60.0)}
        assert all(np.array_equal(received[worker], sent + worker) for worker in range(2))

        pool.start(0, raise_store_full)  # neither memory nor disk has room
        (ended,) = pool.wait(60.0)
        assert ended.is_lost
        with pytest.raises(ClusterError, match="worker 0 is gone: no room is left"):
            ended.value()
        pool.replace(0)
        assert errors(1) == [None]

        os.kill(ask(1, lambda own: os.getpid()), signal.SIGKILL)  # it has no task
        with pytest.raises(LostWorkerError, match="worker 1 is gone: "):
            [ask(1, lambda own: None) for _ in iter(int, 1)]  # until Ray has noticed
        with pytest.raises(
            ClusterError, match="worker 0 cannot answer: ZeroDivisionError: "
        ) as kept:
            ask(0, lambda own: 1 / 0)
        assert not isinstance(kept.value, LostWorkerError), "the worker answers other questions"
    finally:
        pool.close()
