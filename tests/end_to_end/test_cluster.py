"""Several workers on Ray: the texts and the learning of one, whoever is killed.

In float64, where the sum of two workers' gradients is one worker's as far as texts can tell.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from end_to_end import processes
from end_to_end.workshop import Workshop, build, save_untaught
from longtail.cluster import tasks
from longtail.cluster.supervisor import WorkerSupervisor
from longtail.cluster.timeline import read_trace
from longtail.cluster.worker import Worker
from longtail.errors import ClusterError, LostWorkerError

pytest.importorskip("ray")

from ray.exceptions import ObjectStoreFullError

from longtail.cluster.ray import instance as own_ray
from longtail.cluster.ray import pool as ray_pool

WORDS = (
    "--rollout.dtype=float64",
    "--learner.dtype=float64",
    "--run.checkpoint_every=1",
    "--speculation.drafter=history",
)
TWO = ("--cluster.workers=2", "--cluster.hang_s=40")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes begin on two busy cores."""
    monkeypatch.setattr(processes, "PATIENCE_S", 300.0)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    workshop = build(tmp_path_factory.mktemp("cluster"))
    assert workshop.train("one", "--run.steps=3", *WORDS).code == 0
    return workshop


def texts(workshop: Workshop, run: str) -> dict[tuple[int, str], object]:
    """Everything of the rollouts that no rounding can reach."""
    rows = workshop.rollouts(run)
    found = {
        (row["step"], row["request_id"]): (row["text"], row["reward"], row["policy_version"])
        for row in rows
    }
    assert len(found) == len(rows), "nothing is counted twice"
    return found


def workers_of(pid: int) -> Iterator[int]:
    """Processes of Ray's that do a worker's task, among the descendants of a process."""
    for place in Path("/proc").iterdir():
        try:
            name = (place / "cmdline").read_bytes()
            if name.startswith(b"ray::_Actor") and pid in _ancestors(int(place.name)):
                yield int(place.name)
        except (OSError, ValueError):
            continue


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        text = Path(f"/proc/{pid}/stat").read_text()
        pid = int(text.rpartition(")")[2].split()[1])
        yield pid


def test_two_workers_write_and_learn_what_one_does(workshop, tmp_path):
    process = processes.start(
        workshop.words("two", "--run.steps=3", *WORDS, *TWO), tmp_path / "log"
    )
    assert processes.finish(process) == 0, (tmp_path / "log").read_text()
    assert texts(workshop, "two") == texts(workshop, "one")
    workers = {event["tid"] for event in read_trace(workshop.path / "two" / "trace.json")}
    assert workers == {0, 1}


def test_one_worker_resumes_from_the_checkpoint_of_two_sharded_workers(workshop, tmp_path):
    log, words = tmp_path / "log", ("--learner.sharding=full", *WORDS)
    process = processes.start(workshop.words("shards", "--run.steps=2", *words, *TWO), log)
    assert processes.finish(process) == 0, log.read_text()
    assert workshop.train("shards", "--run.steps=3", *words).code == 0
    assert texts(workshop, "shards") == texts(workshop, "one")


def test_a_worker_and_then_the_driver_are_killed_and_nothing_is_lost(workshop, tmp_path):
    log = tmp_path / "log"
    words = workshop.words("killed", "--run.steps=3", *WORDS, *TWO)
    process = processes.start(words, log)
    metrics = workshop.path / "killed" / "metrics.jsonl"
    assert processes.wait_until(lambda: metrics.exists() and metrics.read_bytes() != b"", process)
    victim = next(workers_of(process.pid))
    os.kill(victim, signal.SIGKILL)
    assert processes.wait_until(lambda: "it is replaced" in log.read_text(), process)
    assert processes.wait_until(lambda: len(workshop.metrics("killed")) >= 2, process)
    process.kill()
    processes.finish(process)
    again = processes.start(words, log)
    assert processes.finish(again) == 0, log.read_text()
    assert texts(workshop, "killed") == texts(workshop, "one")


def test_workers_killed_while_they_train_learn_and_publish_change_nothing(workshop, monkeypatch):
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    # Two at a time, and one worker has twice as many: the other is idle for a while.
    uneven = ("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=150")
    words = ("--run.steps=4", *WORDS, f"--speculation.drafter={drafter}", *uneven)
    assert workshop.train("calm", *words, "--spot.train=never").code == 0
    fatal = {tasks.TRAIN_DRAFTER: 1, tasks.LEARN: 4, tasks.PUBLISH: 6}
    """Which begin of a task is its worker's last: two workers, the second step and the third."""
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
    assert said.err.count("it is replaced") == 3
    assert texts(workshop, "deadly") == texts(workshop, "calm")


def test_a_worker_that_died_while_it_had_no_task_is_reported_to_who_asks_it():
    pool = ray_pool.RayWorkerPool(lambda number: None, 1)  # only processes matter
    try:
        assert [ended.error for ended in pool.wait(60.0)] == [None]
        os.kill(pool.ask(0, lambda own: os.getpid()), signal.SIGKILL)
        with pytest.raises(LostWorkerError, match="worker 0 is gone: "):
            [pool.ask(0, lambda own: None) for _ in iter(int, 1)]  # until Ray has noticed
        pool.replace(0)
        assert [ended.error for ended in pool.wait(60.0)] == [None]
        with pytest.raises(
            ClusterError, match="worker 0 cannot answer: ZeroDivisionError: "
        ) as kept:
            pool.ask(0, lambda own: 1 / 0)
        assert not isinstance(kept.value, LostWorkerError), "it answers another question"
    finally:
        pool.close()


def test_a_full_object_store_loses_nothing_and_ends_a_worker_at_most(monkeypatch):
    def find_no_room(own: Worker) -> None:
        raise ObjectStoreFullError("no room is left")

    monkeypatch.setattr(own_ray, "STORE_BYTES", 80 * 2**20)
    pool = ray_pool.RayWorkerPool(lambda number: None, 2)  # only processes matter
    try:
        begun = [ended for _ in range(2) for ended in pool.wait(60.0)]
        assert [ended.error for ended in begun] == [None, None]
        sent = np.arange(25_000_000, dtype=np.float32)  # 100 MB each, on their way together
        for worker in range(2):
            pool.start(worker, lambda own, data: data.copy(), sent + worker)
        came = {ended.worker: ended.value() for _ in range(2) for ended in pool.wait(60.0)}
        assert all(np.array_equal(came[worker], sent + worker) for worker in range(2))
        pool.start(0, find_no_room)  # not even on disk
        (ended,) = pool.wait(60.0)
        assert ended.is_lost
        with pytest.raises(ClusterError, match="worker 0 is gone: no room is left"):
            ended.value()
        pool.replace(0)
        assert [ended.error for ended in pool.wait(60.0)] == [None]
    finally:
        pool.close()
