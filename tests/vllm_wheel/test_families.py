"""Architectures that longtail's decoder lacks: written by vLLM, learned by transformers' code."""

import json
from pathlib import Path

import pytest

from vllm_wheel.families import FAMILIES
from vllm_wheel.runs import NEEDS_VLLM, play

pytestmark = NEEDS_VLLM
_REFUSED = {"gpt_oss": "vLLM cannot take new weights of this model"}
_OTHER_LOGITS = {"deepseek_v3"}
"""vLLM's CPU build computes other logits than transformers, also before any step of a learner."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - _REFUSED - _OTHER_LOGITS))
def test_logprobs_are_the_learners_before_and_after_a_step(family: str, tmp_path: Path) -> None:
    done = play("families.py", family, str(tmp_path / "model"), "none")
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout)["gaps"]
    assert before < 1e-4
    assert after < 1e-4


@pytest.mark.parametrize("family", sorted(_REFUSED))
def test_weights_that_would_stay_old_are_refused(family: str, tmp_path: Path) -> None:
    done = play("families.py", family, str(tmp_path / "model"), "none")
    assert done.returncode != 0
    assert _REFUSED[family] in done.stderr


@pytest.mark.parametrize("family", sorted(_OTHER_LOGITS))
def test_the_gap_shows_where_logits_differ(family: str, tmp_path: Path) -> None:
    """If this fails, vLLM has been mended: move the family to the others."""
    done = play("families.py", family, str(tmp_path / "model"), "none")
    assert done.returncode == 0, done.stderr[-3000:]
    assert max(json.loads(done.stdout)["gaps"]) > 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - _REFUSED - _OTHER_LOGITS))
def test_the_drafter_that_vllm_learns_changes_no_text(family: str, tmp_path: Path) -> None:
    """It needs embedding, head and last states of a model, and nothing of its family."""
    plain, learned = (
        play("families.py", family, str(tmp_path / drafter), drafter)
        for drafter in ("none", "learned")
    )
    assert learned.returncode == 0, learned.stderr[-3000:]
    drafting = json.loads(learned.stdout)
    assert drafting["tokens"] == json.loads(plain.stdout)["tokens"]
    assert drafting["drafted"] > 0
