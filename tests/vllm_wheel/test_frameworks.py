"""The learned drafter inside trainers, whose own code makes vLLM's arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from support import toy
from vllm_wheel.runs import PYTHON, play

FRAMEWORKS = Path(PYTHON).parents[1].with_name("frameworks") if PYTHON else Path("absent")
pytestmark = pytest.mark.skipif(
    not FRAMEWORKS.is_dir(), reason="make build/vllm/frameworks installs the trainers"
)

PINS = {"trl": "0.31", "trl_serve": "0.31", "verl": "0.24", "skyrl": "0.23", "openrlhf": "0.29"}
"""vLLM that each installs."""


def run(trainer: str, *words: str) -> Any:
    there = (FRAMEWORKS / trainer.partition("_")[0]).is_dir()
    if f"/wheel-{PINS[trainer]}." not in PYTHON or not there:
        pytest.skip(f"{trainer} beside vLLM {PINS[trainer]} is not installed")
    done = play("frameworks.py", str(FRAMEWORKS), trainer, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trl_trains_the_same_with_a_drafter_that_vllm_learns(tmp_path: Path) -> None:
    found = {}
    for mode in ("coupled", "learned"):
        folder = tmp_path / mode
        folder.mkdir()
        found[mode] = run("trl", mode, str(toy.REASONER), str(toy.PROBLEMS), str(folder))
        assert max(found[mode]["differences"]) < 1e-4  # vLLM's logprobs and the trainer's
    assert found["learned"]["texts"] == found["coupled"]["texts"]  # those after updates, too
    assert 0 < found["learned"]["accepted"][0] < found["learned"]["accepted"][1]
    before, after = found["learned"]["counts"]
    assert after == pytest.approx(before / 4)
    assert after > 0


@pytest.mark.parametrize("trainer", ["trl_serve", "verl", "skyrl", "openrlhf"])
def test_weights_that_come_a_trainers_way_change_the_texts_and_drafts_stand_again(
    tmp_path: Path, trainer: str
) -> None:
    """vLLM's arguments are of the trainer's code, as is the extension that loads weights."""
    found = run(trainer, str(tmp_path), str(toy.REASONER))
    old, again, new, later, plain = (turn["tokens"] for turn in found)
    assert old == again != new == later == plain
    accepted = [turn["metrics"]["vllm:spec_decode_num_accepted_tokens"] for turn in found[:4]]
    assert accepted == sorted(set(accepted))
    assert found[1]["count"] > found[2]["count"]
