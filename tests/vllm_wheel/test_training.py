"""Training with vLLM behind the loop: it does what it does with longtail's engine.

Each run is the command line in the environment with vLLM.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import longtail
from support import toy

PYTHON = os.environ.get("LONGTAIL_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LONGTAIL_VLLM_PYTHON names the python of an environment with vLLM"
)
_PATIENCE_S = 300.0
_OPTIONS = (
    "--rollout.dtype=float32", "--rollout.prompts_per_step=2", "--rollout.group_size=4",
    "--rollout.max_tokens=96", "--rollout.max_running=8", "--run.checkpoint_every=1",
    "--data.heldout_size=2", "--eval.samples=1", "--cluster.worker_timeout_s=60",
)  # fmt: skip


@contextmanager
def training(path: Path, *options: str, steps: int = 4) -> Iterator[subprocess.Popen[bytes]]:
    """Start `longtail train` on the toy."""
    packages = (Path(longtail.__file__).parent.parent, Path(toy.__file__).parent.parent)
    words = (*toy.WORDS, *_OPTIONS, f"--run.steps={steps}", f"--run.dir={path}", *options)
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, packages)), "OMP_NUM_THREADS": "1"}
    with (path.parent / f"{path.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", "longtail.cli.main", "train", *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def finish(path: Path, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Wait for the end; return the graded completions."""
    log = (path.parent / f"{path.name}.log").read_text
    assert process.wait(_PATIENCE_S) == 0, log()[-3000:]
    rows = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["step"], row["request_id"]))


def written(path: Path, *options: str) -> list[dict[str, Any]]:
    """Return the graded completions of an undisturbed run."""
    with training(path, *options) as process:
        return finish(path, process)


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert process.poll() is None, "the run ended before it was disturbed"
        assert time.monotonic() < deadline, "the run has not come so far"
        time.sleep(0.05)


def steps_logged(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Compare texts, rewards and tokens; logprobs are rounded otherwise."""
    return [{**row, "logprob": 0.0} for row in one] == [{**row, "logprob": 0.0} for row in other]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What longtail's engine writes, without a drafter."""
    path = tmp_path_factory.mktemp("own") / "run"
    return written(path, "--rollout.engine=own", "--speculation.drafter=none")


@pytest.mark.parametrize("drafter", ["none", "auto", str(toy.DRAFTERS["eagle3"])])
def test_a_run_is_that_of_longtails_engine(drafter, own, tmp_path) -> None:
    path = tmp_path / "run"
    found = written(path, "--rollout.engine=vllm", f"--speculation.drafter={drafter}")
    assert same(found, own)
    metrics = [json.loads(row) for row in (path / "metrics.jsonl").read_text().splitlines()]
    assert ("speculation/accept_length" in metrics[-1]) == (drafter != "none")
    assert "rollout/bookkeeping_share" not in metrics[-1]  # vLLM does not tell


def test_a_killed_worker_changes_no_text(own, tmp_path) -> None:
    """Two workers, of which an idle one trains the drafter; one is killed and replaced."""
    path = tmp_path / "run"
    with training(path, "--rollout.engine=vllm", "--cluster.workers=2") as process:
        wait(lambda: steps_logged(path) >= 1, process)
        workers = [
            each
            for each in psutil.process_iter(["cmdline"])
            if any("RayWorker" in word or "_Actor" in word for word in each.info["cmdline"] or ())
        ]
        assert workers, "no worker was found"
        workers[-1].send_signal(signal.SIGKILL)
        assert same(finish(path, process), own)
    assert "is gone" in (tmp_path / "run.log").read_text()


def test_a_killed_run_resumes_as_if_it_had_not_been(own, tmp_path) -> None:
    path = tmp_path / "run"
    with training(path, "--rollout.engine=vllm") as process:
        wait(lambda: steps_logged(path) >= 2, process)
        process.kill()
        process.wait()
    with training(path, "--rollout.engine=vllm") as process:
        assert same(finish(path, process), own)
