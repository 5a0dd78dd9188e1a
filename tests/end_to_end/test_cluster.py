"""Several workers on Ray write and learn what one does, also when they or their driver are killed.

Who can reach the processes of such a run, what it says, and what it leaves behind.
"""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from end_to_end import processes
from end_to_end.workshop import EXACT, Workshop, build, save_untaught
from longtail.cluster import rollout
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.errors import ClusterError, LostWorkerError
from longtail.system.files import process_of
from support import moves
from support.listening import family, listening

pytest.importorskip("ray")

from ray.exceptions import ObjectStoreFullError

from longtail.cluster.workers.ray import own_ray, ray_processes

pytestmark = pytest.mark.slow

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
TWO = ("--cluster.workers=2", "--cluster.worker_timeout_s=40")
UNEVEN = (
    *("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=150"),
    "--data.heldout_size=0",
)
"""A worker decodes two at a time, and one has twice as many requests: the other becomes idle."""
RAYS_VOICE = re.compile(r"\(raylet|\(Actor|pid=|\[20\d\d-\d\d-\d\d |Worker ID|Traceback")


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return build(tmp_path)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BaseProcess]]:
    """Begin a command that ends with its test; six processes begin on two busy cores."""
    monkeypatch.setattr(processes, "PATIENCE_S", 300.0)
    started: list[BaseProcess] = []

    def begin(words: list[str], log: Path) -> BaseProcess:
        started.append(processes.start(words, log))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def folder_of(pid: int) -> Path | None:
    """The folder of a run's own Ray, as the processes of Ray know it."""
    for member in family(pid):
        try:
            command = Path(f"/proc/{member}/cmdline").read_text()
        except OSError:
            continue
        if found := re.search(r"=(\S*?/longtail-ray-\w+)/ray/", command):
            return Path(found[1])
    return None


def wait_until_gone(pids: list[int], folder: Path) -> None:
    """Wait for the reaper of a Ray, which ends what is left a moment after the driver's end."""
    deadline = time.monotonic() + processes.PATIENCE_S
    while left := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    while folder.exists():
        assert time.monotonic() < deadline, folder
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def check_ports(driver: int) -> None:
    """Each open port of a run is in the table of SECURITY.md, with its address."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", SECURITY.read_text(), flags=re.MULTILINE)
    known = {program: where.strip() for program, where in rows}
    found = [
        ("longtail" if each.pid == driver else each.program, each)
        for each in listening(family(driver))
    ]
    assert {"longtail", "gcs_server", "raylet", "ray::Actor"} <= {name for name, _ in found}
    for name, each in found:
        assert name in known, f"SECURITY.md does not say that {name} listens: {each}"
        assert each.is_loopback or known[name] != "loopback", f"{name}: {each}"


def test_shards_listen_on_loopback_leave_nothing_when_killed_and_one_worker_resumes_them(
    workshop, start
):
    """One worker makes step 1, two with shards the next ones until their driver is killed."""
    drafter = save_untaught(workshop.model, workshop.path / "drafter")
    words = (*EXACT, *UNEVEN, f"--speculation.drafter={drafter}", "--learner.sharding=full")
    assert workshop.train("run", "--run.steps=1", *words).code == 0
    log = workshop.path / "log"
    process = start(workshop.words("run", "--run.steps=100000", *words, *TWO), log)
    pid = process.pid
    assert pid is not None
    saved = processes.wait_until(lambda: workshop.steps_saved("run")[-1] > 1, process)
    assert saved, log.read_text()
    check_ports(pid)
    assert process_of(workshop.path / "run") == pid
    folder, pids = folder_of(pid), family(pid)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    token = (folder / "token").read_text()
    commands = [Path(f"/proc/{each}/cmdline").read_text() for each in pids]
    assert not any(token in command for command in commands), "others may read it there"
    process.kill()
    assert processes.finish(process) == -signal.SIGKILL
    wait_until_gone(pids, folder)

    steps = workshop.steps_saved("run")[-1] + 1
    assert workshop.train("run", f"--run.steps={steps}", *words).code == 0
    trace = (workshop.path / "run" / "trace.json").read_text().removesuffix(",\n")
    events = json.loads(f"{trace}]")
    assert {event["tid"] for event in events} == {0, 1}
    assert "spot" in {event["name"] for event in events}
    plain = ("--speculation.drafter=none", f"--run.steps={steps}", "--learner.sharding=none")
    assert workshop.train("one", *words, *plain).code == 0
    assert workshop.texts("run") == workshop.texts("one")


def test_requests_that_move_and_workers_killed_meanwhile_change_no_bit(
    workshop, monkeypatch, capfd
):
    """In float32: a worker is killed as it learns ahead, another as it hands requests over.

    Then the run is stopped, and says where.
    """
    left = {"ahead": 2, "release": 3}
    """Number of the micro-batch and of the move that kill their worker."""
    start, tell = WorkerPool.start, WorkerPool.tell

    def kill(pool: WorkerPool, worker: int, what: str) -> None:
        pids = [pool.ask(each, lambda own: os.getpid()) for each in (0, 1)]
        if pool.workers(State.STARTING) or None in pids:
            return  # with both workers the policy would be lost
        left[what] -= 1
        if left[what] == 0:
            os.kill(pids[worker], signal.SIGKILL)

    def deadly_start(pool: WorkerPool, worker: int, task: Any, *args: Any) -> None:
        start(pool, worker, task, *args)
        if task is Worker.accumulate:
            kill(pool, worker, "ahead")
        elif task is Worker.publish and worker == 0 and max(left.values()) <= 0:
            os.kill(os.getpid(), signal.SIGHUP)

    def deadly_tell(pool: WorkerPool, worker: int, message: Any, *args: Any) -> bool:
        told = tell(pool, worker, message, *args)
        if message is Worker.release:
            kill(pool, worker, "release")
        return told

    words = ("--speculation.drafter=fresh+history", *UNEVEN)
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "_SHARE_S", moves.SHARE_S)
        patch.setattr(rollout, "best_move", moves.half_of_the_most)
        patch.setattr(WorkerPool, "start", deadly_start)
        patch.setattr(WorkerPool, "tell", deadly_tell)
        said = workshop.train("moved", "--run.steps=100", *words, *TWO)
    assert said.code == 130, said.err
    assert said.err.count("is gone") == said.err.count("it is replaced") == 2
    printed = capfd.readouterr()
    assert not RAYS_VOICE.search(said.err + printed.out + printed.err), said.err
    stopped = re.search(r"stopped after step (\d+); the same command continues", said.err)
    assert stopped is not None, said.err
    steps = int(stopped[1])
    assert folder_of(os.getpid()) is None
    assert workshop.train("whole", f"--run.steps={steps}", *words).code == 0
    assert workshop.texts("moved") == workshop.texts("whole")
    weights = [workshop.policy(run, steps) / "model.safetensors" for run in ("moved", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert workshop.drafter("moved", steps) == workshop.drafter("whole", steps) is not None


def test_a_dead_worker_and_a_full_object_store_are_reported_and_cost_a_worker_at_most(monkeypatch):
    def raise_store_full(worker: Worker) -> None:
        raise ObjectStoreFullError("no room is left")

    def ask(worker: int, message: Any) -> Any:
        answer = pool.answers(message, {worker: ()})[worker]
        if isinstance(answer, ClusterError):
            raise answer
        return answer

    monkeypatch.setattr(own_ray, "STORE_BYTES", 80 * 2**20)
    pool = ray_processes.RayProcesses(lambda number: None, 2)  # only the processes matter
    try:
        started = [ended for _ in range(2) for ended in pool.wait(60.0)]
        assert [ended.error for ended in started] == [None, None]
        sent = np.arange(12_000_000, dtype=np.float32)  # two transfers of 48 MB at once
        for worker in range(2):
            pool.start(worker, lambda own, data: data.copy(), sent + worker)
        received = {ended.worker: ended.value() for _ in range(2) for ended in pool.wait(60.0)}
        assert all(np.array_equal(received[worker], sent + worker) for worker in range(2))

        with pytest.raises(
            ClusterError, match="worker 0 cannot answer: ZeroDivisionError: "
        ) as kept:
            ask(0, lambda own: 1 / 0)
        assert not isinstance(kept.value, LostWorkerError), "the worker answers other questions"
        pool.start(0, raise_store_full)  # neither memory nor disk has room
        (ended,) = pool.wait(60.0)
        assert ended.is_lost
        with pytest.raises(ClusterError, match="worker 0 is gone: no room is left"):
            ended.value()

        os.kill(ask(1, lambda own: os.getpid()), signal.SIGKILL)  # it has no task
        with pytest.raises(LostWorkerError, match="worker 1 is gone: "):
            [ask(1, lambda own: None) for _ in iter(int, 1)]  # until Ray has noticed
    finally:
        pool.close()
