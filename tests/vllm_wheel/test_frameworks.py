"""The learned drafter inside TRL and verl, whose own code makes vLLM's arguments."""

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


def run(*words: str) -> Any:
    done = play("frameworks.py", str(FRAMEWORKS), *words)
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


def test_verls_option_reaches_vllm_and_its_weights_change_the_policy(tmp_path: Path) -> None:
    found = run("verl", str(tmp_path), str(toy.REASONER))
    assert found["method"] == "ngram"  # what a learned drafter stands for with V1
    assert "learned" in " ".join(found["words"])
    first, after, second, last = found["counts"]
    assert after == pytest.approx(first / 4)
    assert last == pytest.approx(second / 4)
