"""Architectures that longtail's decoder lacks: written by vLLM, learned by transformers' code."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_wheel.families import FAMILIES
from vllm_wheel.runs import NEEDS_VLLM, play

pytestmark = NEEDS_VLLM
_REFUSED = {"gpt_oss": "vLLM cannot take new weights of this model"}


def found(family: str, path: Path, drafter: str) -> Any:
    done = play("families.py", family, str(path / drafter), drafter)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - _REFUSED))
def test_logprobs_are_the_learners_and_a_learned_drafter_changes_no_text(family, tmp_path):
    """Before and after a step; the drafter needs embedding, head and last states of a model."""
    plain, learned = (found(family, tmp_path, drafter) for drafter in ("none", "learned"))
    assert max(*plain["gaps"], *learned["gaps"]) < 1e-4
    assert learned["tokens"] == plain["tokens"]
    assert learned["drafted"] > 0


@pytest.mark.parametrize("family", sorted(_REFUSED))
def test_weights_that_would_stay_old_are_refused(family, tmp_path):
    done = play("families.py", family, str(tmp_path / "model"), "none")
    assert done.returncode != 0
    assert _REFUSED[family] in done.stderr
