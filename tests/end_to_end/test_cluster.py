"""Shards on Ray: who can reach the processes of a run, and what it leaves behind; faults of Ray.

What kills leave of texts and weights: test_chaos.py.
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
from end_to_end.chaos import folder_of
from end_to_end.workshop import EXACT, Workshop, build, save_untaught
from longtail.cluster.workers.worker import Worker
from longtail.errors import ClusterError, LostWorkerError
from longtail.system.files import process_of
from support.run_processes import family, listening

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
    folder, pids = Path(folder_of(pid)), family(pid)
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
