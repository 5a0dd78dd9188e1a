"""Runs of the command line in the environment with vLLM, on the toy model."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import longtail
from support import toy

PYTHON = os.environ.get("LONGTAIL_VLLM_PYTHON", "")
NEEDS_VLLM = pytest.mark.skipif(
    not PYTHON, reason="LONGTAIL_VLLM_PYTHON names the python of an environment with vLLM"
)
PACKAGES = (Path(longtail.__file__).parent.parent, Path(toy.__file__).parent.parent)
"""Directories of longtail and of these tests."""
PATIENCE_S = 300.0
OPTIONS = (
    "--rollout.dtype=float32", "--rollout.prompts_per_step=2", "--rollout.group_size=4",
    "--rollout.max_tokens=96", "--rollout.max_running=8", "--run.checkpoint_every=1",
    "--data.heldout_size=2", "--eval.samples=1", "--cluster.worker_timeout_s=60",
)  # fmt: skip


def play(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a script of this directory; its last words are `PACKAGES`."""
    command = [PYTHON, "-I", str(Path(__file__).with_name(script)), *words, *map(str, PACKAGES)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1500)


def play_scenes(job: dict[str, Any]) -> dict[str, Any]:
    """Play the scenes of a job, one after the other; return what each found."""
    done = play("scenes.py", json.dumps(job))
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert not [each["failed"] for each in found.values() if "failed" in each]
    return found


@contextmanager
def training(
    path: Path, *options: str, steps: int = 4, program: str = "longtail.cli.main"
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `longtail train` on the toy."""
    words = (*toy.WORDS, *OPTIONS, f"--run.steps={steps}", f"--run.dir={path}", *options)
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, PACKAGES)), "OMP_NUM_THREADS": "1"}
    with (path.parent / f"{path.name}.log").open("ab") as log:
        process = subprocess.Popen(
            [PYTHON, "-m", program, "train", *words],
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
    assert process.wait(PATIENCE_S) == 0, log()[-3000:]
    return read(path)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the graded completions of a run."""
    rows = [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: (row["step"], row["request_id"]))


def written(path: Path, *options: str, **more: Any) -> list[dict[str, Any]]:
    """Return the graded completions of an undisturbed run; `more` as for `training`."""
    with training(path, *options, **more) as process:
        return finish(path, process)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in (path / "metrics.jsonl").read_text().splitlines()]


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """Compare texts, rewards and tokens; logprobs are rounded otherwise."""
    return [{**row, "logprob": 0.0} for row in one] == [{**row, "logprob": 0.0} for row in other]
