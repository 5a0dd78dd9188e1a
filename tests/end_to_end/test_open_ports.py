"""A run with workers of its own Ray: who can reach it, what it says, and what it leaves behind."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from end_to_end import processes
from end_to_end.workshop import Workshop, build
from longtail.system.files import process_of
from support.listening import Listening, family, listening

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

SECURITY = Path(__file__).parents[2] / "SECURITY.md"
TWO = ("--cluster.workers=2", "--cluster.worker_timeout_s=40", "--speculation.drafter=history")
RAYS_VOICE = re.compile(r"\(raylet|\(Actor|pid=|\[20\d\d-\d\d-\d\d |Worker ID|Traceback")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., BaseProcess]]:
    """Begin a command that ends with its test."""
    monkeypatch.setattr(processes, "PATIENCE_S", 300.0)
    started: list[BaseProcess] = []

    def begin(words: list[str], log: Path) -> BaseProcess:
        started.append(processes.start(words, log))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return build(tmp_path)


def table() -> dict[str, str]:
    """Return the address that SECURITY.md names for each program."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", SECURITY.read_text(), flags=re.MULTILINE)
    return {program: where.strip() for program, where in rows}


def sockets(process: BaseProcess) -> Iterator[tuple[str, Listening]]:
    """Yield the open ports of a run with their programs; Ray shortens names of processes."""
    assert process.pid is not None
    for each in listening(family(process.pid)):
        yield ("longtail" if each.pid == process.pid else each.program), each


def folder_of(process: BaseProcess) -> Path | None:
    """The folder of a run's own Ray, as the processes of Ray know it."""
    assert process.pid is not None
    for pid in family(process.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if found := re.search(r"=(\S*?/longtail-ray-\w+)/ray/", command):
            return Path(found[1])
    return None


def is_gone(pids: list[int], folder: Path) -> bool:
    return not folder.exists() and not any(_lives(pid) for pid in pids)


def _lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_run_listens_on_loopback_only_says_one_line_of_a_loss_and_leaves_nothing(workshop, start):
    log, metrics = workshop.path / "log", workshop.path / "run" / "metrics.jsonl"
    words = workshop.words("run", "--run.steps=100000", "--run.save_rollouts=false", *TWO)
    process = start(words, log)
    assert process.pid is not None
    assert processes.wait_until(lambda: metrics.exists() and metrics.read_bytes() != b"", process)

    known = table()
    found = list(sockets(process))
    assert {"longtail", "gcs_server", "raylet", "ray::Actor"} <= {name for name, _ in found}
    for name, each in found:
        assert name in known, f"SECURITY.md does not say that {name} listens: {each}"
        assert each.is_loopback or known[name] != "loopback", f"{name}: {each}"
    assert process_of(workshop.path / "run") == process.pid

    folder = folder_of(process)
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    token = (folder / "token").read_text()
    pids = family(process.pid)
    for pid in pids:
        assert token not in Path(f"/proc/{pid}/cmdline").read_text(), "others may read it there"

    victim = next(each.pid for name, each in found if name == "ray::Actor")
    os.kill(victim, signal.SIGKILL)
    assert processes.wait_until(lambda: "it is replaced" in log.read_text(), process)
    lines = metrics.read_text().count("\n")
    assert processes.wait_until(lambda: metrics.read_text().count("\n") > lines + 1, process)
    pids = sorted({*pids, *family(process.pid)})
    os.kill(process.pid, signal.SIGHUP)
    assert processes.finish(process) == 130, log.read_text()
    said = log.read_text()
    assert re.search(r"stopped after step \d+; the same command continues from there", said)
    assert len(re.findall("is gone", said)) == 1
    assert not RAYS_VOICE.search(said), said
    assert is_gone(pids, folder)


def test_a_run_that_is_told_to_stop_while_it_starts_says_a_word_and_leaves_nothing(workshop, start):
    log = workshop.path / "log"
    process = start(workshop.words("run", *TWO), log)
    assert process.pid is not None
    assert processes.wait_until(lambda: folder_of(process) is not None, process, poll_s=0.05)
    folder, pids = folder_of(process), family(process.pid)
    assert folder is not None
    os.kill(process.pid, signal.SIGTERM)
    assert processes.finish(process) == 130, log.read_text()
    assert log.read_text().strip() == "longtail: interrupted"
    # What Ray had begun and not yet told of is ended by its reaper, a moment after.
    deadline = time.monotonic() + processes.PATIENCE_S
    while not is_gone(pids, folder):
        assert time.monotonic() < deadline, [pid for pid in pids if _lives(pid)]
        time.sleep(0.05)
