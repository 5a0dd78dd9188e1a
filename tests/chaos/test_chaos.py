"""The runner sees what goes wrong; test_cluster.py has runs with faults at chosen moments."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from chaos import runner
from chaos.runner import Failure, Fault, Run
from end_to_end.workshop import write_lines

_DISTURBED = """
import subprocess, time
from pathlib import Path
def say(line):
    print(line, flush=True)
if not Path(__file__).with_name("begun").exists():
    Path(__file__).with_name("begun").touch()
    for step in (1, 2):
        actor = subprocess.Popen(["ray::Actor", "600"], executable="sleep")
        say(f"step {step}/3  done")
        say(f"ended with {actor.wait()}")
    say("step 3/3  done")
    time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Run]:
    """Make a run of another program, of which failures are found at once."""
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/program.py\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(runner, "_EACH_FAULT_S", 1.0)
    monkeypatch.setattr(runner, "_LEFTOVER_S", 0.1)

    def make(program: str) -> Run:
        (tmp_path / "program.py").write_text(program)
        return Run([], tmp_path / "run")

    return make


def test_workers_and_the_driver_are_killed_at_their_steps_and_the_run_is_started_again(
    run: Callable[[str], Run], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(runner, "_EACH_FAULT_S", 60.0)
    killed = [Fault(kind="worker killed", moment=0.0, step=step) for step in (1, 2)]
    disturbed = run(_DISTURBED)
    disturbed.finish([*killed, Fault(kind="driver killed", moment=0.0, step=3)], seconds=1.0)
    first, second = ((disturbed.place / f"log-{sitting}").read_text() for sitting in (0, 1))
    assert first.count("ended with -9") == 2
    assert second == ""


@pytest.mark.parametrize(
    ("program", "failure"),
    [
        ("import time; time.sleep(600)", "hang: not finished after"),
        ("raise SystemExit('out of luck')", "the run ended with code 1: out of luck"),
        ("import subprocess; subprocess.Popen(['sleep', '600'])", "outlived the run.*sleep 600"),
        ("print('Traceback (most recent call last)')", "shows a traceback"),
    ],
)
def test_a_run_that_hangs_or_ends_by_itself_or_leaves_processes_fails(
    run: Callable[[str], Run], program: str, failure: str
):
    with pytest.raises(Failure, match=failure):
        run(program).finish([], seconds=0.1)


def test_a_rollout_or_weights_that_differ_are_seen(tmp_path: Path):
    row = {"step": 1, "request_id": "a", "text": "7", "reward": 1.0, "policy_version": 0}
    row["logprob"] = -0.5
    policy = tmp_path / "checkpoints" / "step_000001" / "policy"
    policy.mkdir(parents=True)
    (policy / "model.safetensors").write_bytes(b"weights")
    write_lines(tmp_path / "rollouts.jsonl", row)
    found = runner.result_of(tmp_path)
    runner.check_equal(found, found)
    for other in (replace(found, rollouts={}), replace(found, weights="")):
        with pytest.raises(Failure, match="differ"):
            runner.check_equal(found, other)
    write_lines(tmp_path / "rollouts.jsonl", row, row)
    with pytest.raises(Failure, match="1 rollouts are logged twice"):
        runner.result_of(tmp_path)


def test_faults_follow_from_the_seed_and_are_one_of_each_kind():
    first, again, other = (runner.faults(random.Random(seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert {fault.kind for fault in first} == {"worker killed", "worker stopped", "driver killed"}
