"""A short chaos run, and the runner: it sees what goes wrong."""

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from chaos import runner
from chaos.runner import Failure, Fault, Run
from end_to_end.workshop import say, write_lines

pytest.importorskip("ray")


@pytest.mark.slow
def test_a_run_with_faults_writes_what_it_would_have(tmp_path: Path):
    if not runner.is_exact():
        pytest.skip("no native kernels: a text may depend on its batch")
    words = runner.words_of(tmp_path / "parts", "--run.checkpoint_every=2", "--run.threads=1")
    alone = ("--cluster.workers=1", f"--run.dir={tmp_path / 'alone'}")
    assert say(*words, *alone).code == 0
    expected = runner.result_of(tmp_path / "alone")
    rewards = {rollout[1] for rollout in expected.rollouts.values()}
    assert len(rewards) > 1, "without a gradient all policies are alike"
    assert len(expected.rollouts) == 4 * 3 * 4
    planned = [
        Fault(kind="worker killed", moment=0.0, step=1),
        Fault(kind="driver killed", moment=0.0, step=3),
    ]
    runner.trial(words, planned, expected, tmp_path / "disturbed", seconds=20.0)
    first, second = ((tmp_path / "disturbed" / f"log-{n}").read_text() for n in (0, 1))
    assert "it is replaced" in first
    assert re.search(r"resumed after step [23]", second)


@pytest.mark.slow
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, failure: str
):
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {runner.sys.executable} $PROGRAM\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PROGRAM", str(tmp_path / "program.py"))
    monkeypatch.setattr(runner.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(runner, "_EACH_FAULT_S", 1.0)
    monkeypatch.setattr(runner, "_LEFTOVER_S", 0.1)
    with pytest.raises(Failure, match=failure):
        Run([], tmp_path / "run").finish([], seconds=0.1)


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
