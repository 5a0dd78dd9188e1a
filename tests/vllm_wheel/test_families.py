"""Architectures that longtail's decoder lacks: written by vLLM, learned by transformers' code."""

import json
import os
import subprocess
from pathlib import Path

import pytest

import longtail
from support import toy
from vllm_wheel.families import FAMILIES

PYTHON = os.environ.get("LONGTAIL_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LONGTAIL_VLLM_PYTHON names the python of an environment with vLLM"
)
_SCRIPT = Path(__file__).with_name("families.py")
_REFUSED = {"gpt_oss": "vLLM cannot take new weights of this model"}
_OTHER_LOGITS = {"deepseek_v3"}
"""vLLM's CPU build computes other logits than transformers, also before any step of a learner."""


def played(family: str, place: Path) -> "subprocess.CompletedProcess[str]":
    packages = (Path(longtail.__file__).parent.parent, Path(toy.__file__).parent.parent)
    return subprocess.run(
        [PYTHON, "-I", str(_SCRIPT), family, str(place), *map(str, packages)],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - _REFUSED - _OTHER_LOGITS))
def test_logprobs_are_the_learners_before_and_after_a_step(family: str, tmp_path: Path) -> None:
    done = played(family, tmp_path / "model")
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout)["gaps"]
    assert before < 1e-4
    assert after < 1e-4


@pytest.mark.parametrize("family", sorted(_REFUSED))
def test_weights_that_would_stay_old_are_refused(family: str, tmp_path: Path) -> None:
    done = played(family, tmp_path / "model")
    assert done.returncode != 0
    assert _REFUSED[family] in done.stderr


@pytest.mark.parametrize("family", sorted(_OTHER_LOGITS))
def test_the_gap_shows_where_logits_differ(family: str, tmp_path: Path) -> None:
    """If this fails, vLLM has been mended: move the family to the others."""
    done = played(family, tmp_path / "model")
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(json.loads(done.stdout)["gaps"]) > 1e-4
