"""Several workers on Ray: the texts and the learning of one, whoever is killed.

In float64, where the sum of two workers' gradients is one worker's as far as texts can tell.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from end_to_end import processes
from end_to_end.workshop import Workshop, build
from longtail.cluster.timeline import read_trace

pytest.importorskip("ray")

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
