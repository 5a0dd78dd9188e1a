"""The whole Model Runner V2 of vLLM, which schedules ahead: its texts are those without the plugin.

It runs on the CPU with its kernels under Triton's interpreter; as on a GPU but for the kernels'
compilation, CUDA graphs and streams.
"""

from pathlib import Path
from typing import Any

import pytest

from longtail.assembly.drafters import read_drafter
from longtail.drafter.formats.eagle_export import write_layout
from longtail.model.hf.model import load_model
from support import toy
from support.contract import toy_target
from vllm_wheel.runs import NEEDS_VLLM, play_scenes, same, written
from vllm_wheel.test_v1 import accepted_share

pytestmark = NEEDS_VLLM
V2 = "vllm_wheel.runner_v2"
SCENES = (("stock",), ("eagle3", "learned"))
"""Scenes of two processes: the plugin serves all engines of one, or none."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("v2")
    target = toy_target()
    loaded = read_drafter(str(toy.DRAFTERS["eagle3"]), target, target.model.dtype)
    assert loaded is not None
    loaded.layer.fold()
    write_layout(root / "eagle3", loaded, load_model(toy.REASONER))
    prompts = [list(range(5 + index % 3, 25)) for index in range(7)]
    job = {"target": str(toy.REASONER), "prompts": prompts, "seeds": list(range(7))}
    job |= {name: str(root / name) for name in ("eagle3", "saved")} | {"runner": "v2", "turns": 3}
    found = dict[str, Any]()
    for scenes in SCENES:
        found |= play_scenes(job | {"scenes": scenes})
    return found


def test_coupled_drafts_change_no_text(played: dict[str, Any]) -> None:
    for turn in played["eagle3"]:
        assert turn["tokens"] == played["stock"]["tokens"]
        assert turn["metrics"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_vllm_learns_a_drafter_and_writes_the_same(played: dict[str, Any]) -> None:
    learned = played["learned"]
    for turn in (*learned["turns"], learned["renewed"]):
        assert turn["tokens"] == played["stock"]["tokens"]
    assert learned["turns"][-1]["metrics"]["vllm:num_preemptions"] > 0
    assert accepted_share(learned["turns"][-2], learned["turns"][-1]) > 0.4
    assert learned["status"]["learned"]["solves"] > 0


def test_a_run_writes_the_same_with_a_drafter_that_vllm_learns(tmp_path: Path) -> None:
    words = ("--rollout.engine=vllm", "--rollout.max_tokens=48", "--cluster.worker_timeout_s=300")
    runs = [
        written(tmp_path / name, *words, f"--speculation.drafter={name}", steps=2, program=V2)
        for name in ("none", "fresh")
    ]
    assert same(*runs)
