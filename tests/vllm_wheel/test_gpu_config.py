"""What `longtail train` asks of vLLM on an H100: the whole configuration, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from support import toy
from vllm_wheel.runs import NEEDS_VLLM, play

pytestmark = NEEDS_VLLM
EAGLE = {"method": "eagle3", "depth": 8, "ahead": True}
CASES: dict[str, dict[str, Any]] = {
    "none": {"method": None, "depth": None, "ahead": True},
    "fresh": {"method": "ngram_gpu", "depth": 4, "ahead": True},
    "history": {"method": "ngram", "depth": 8, "ahead": False},
    str(toy.DRAFTERS["eagle3"]): EAGLE,
}
"""Names of drafters, what vLLM's speculation is then, and whether it schedules steps ahead."""
SHARING = ("--cluster.workers=2", "--cluster.gpus_per_worker=0.5")


def configuration(*words: str) -> dict[str, Any]:
    done = play("gpu_config.py", str(toy.REASONER), *words, "--")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("drafter", CASES, ids=lambda name: Path(name).name)
def test_every_drafter_runs_in_the_second_runner_with_whole_graphs(drafter: str) -> None:
    found = configuration(f"--speculation.drafter={drafter}")
    expected = {"v2": True, "graphs": "FULL_AND_PIECEWISE", "dtype": "torch.bfloat16"}
    expected |= {"share": 0.4, "kv_bytes": None, **CASES[drafter]}
    assert {name: found[name] for name in expected} == expected
    assert found["tokens"] >= 8192 + 64 * 9
    assert found["scheduled"] in (None, found["tokens"]), "drafts take no tokens from prompts"


def test_workers_that_share_a_gpu_measure_nothing() -> None:
    found = configuration("--speculation.drafter=none", *SHARING)
    assert found["share"] == pytest.approx(0.2)
    assert 0 < found["kv_bytes"] < 0.2 * 80 * 2**30
