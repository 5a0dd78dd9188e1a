"""Training with vLLM behind the loop: it does what it does with longtail's engine."""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_wheel.runs import NEEDS_VLLM, PATIENCE_S, finish, read_metrics, same, training, written

pytestmark = NEEDS_VLLM


def wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the run ended before it was disturbed"
        assert time.monotonic() < deadline, "the run has not come so far"
        time.sleep(0.05)


def steps_logged(path: Path) -> int:
    file = path / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What longtail's engine writes, without a drafter."""
    path = tmp_path_factory.mktemp("own") / "run"
    return written(path, "--rollout.engine=own", "--speculation.drafter=none")


def test_a_run_is_that_of_longtails_engine(own, tmp_path):
    path = tmp_path / "run"
    assert same(written(path, "--rollout.engine=vllm", "--speculation.drafter=auto"), own)
    metrics = read_metrics(path)
    assert "speculation/accept_length" in metrics[-1]
    assert "rollout/bookkeeping_share" not in metrics[-1]  # vLLM does not tell


SHARING = ("--cluster.workers=2", "--cluster.gpus_per_worker=0.5",
           "--rollout.vllm={kv_cache_memory_bytes = 300000000}")  # fmt: skip


@pytest.mark.parametrize("more", [(), SHARING], ids=["one-worker", "two-workers-on-a-gpu"])
def test_a_run_on_a_gpu_is_the_same(more, own, tmp_path):
    """The GPU is pretended: no tensor of the loop meets one of another device."""
    words = ("--rollout.engine=vllm", "--run.device=cuda", "--learner.autocast=false", *more)
    assert same(written(tmp_path / "run", *words, program="support.pretend_training"), own)


def test_finished_groups_are_learned_from_while_other_texts_are_written(own, tmp_path):
    """Two workers decode two texts at a time each, and learn a drafter from all of them."""
    path = tmp_path / "run"
    words = ("--rollout.engine=vllm", "--speculation.drafter=fresh", "--cluster.workers=2",
             "--learner.streaming=true", "--rollout.max_running=2")  # fmt: skip
    assert same(written(path, *words), own)
    metrics = read_metrics(path)
    assert sum(row["cluster/learning_ahead_s"] for row in metrics) > 0
    assert metrics[-1]["speculation/accept_length"] > 1


def test_a_policy_in_shards_learns_beside_vllm(tmp_path):
    """FSDP2's process group and vLLM's are in one process; sums over shards round otherwise."""
    shards = ("--learner.sharding=full", "--cluster.workers=2")
    found = written(tmp_path / "vllm", "--rollout.engine=vllm", *shards)
    assert same(found, written(tmp_path / "own", "--rollout.engine=own", *shards))


def test_a_killed_worker_changes_no_text(own, tmp_path):
    """Two workers, of which an idle one trains the drafter; one is killed and replaced."""
    path = tmp_path / "run"
    with training(path, "--rollout.engine=vllm", "--cluster.workers=2") as process:
        wait(lambda: steps_logged(path) >= 1, process)
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [each for each in children if "ray::Actor" in " ".join(each.cmdline())]
        assert workers, "no worker was found"
        workers[-1].send_signal(signal.SIGKILL)
        assert same(finish(path, process), own)
    assert "is gone" in (tmp_path / "run.log").read_text()


def test_a_killed_run_resumes_as_if_it_had_not_been(own, tmp_path):
    path = tmp_path / "run"
    with training(path, "--rollout.engine=vllm") as process:
        wait(lambda: steps_logged(path) >= 2, process)
        process.kill()
        process.wait()
    with training(path, "--rollout.engine=vllm") as process:
        assert same(finish(path, process), own)
