"""The drafter of a run that vLLM generates for."""

from typing import Any

import pytest

from longtail.assembly import vllm
from longtail.assembly.drafters import fresh
from longtail.config.rl import load
from longtail.errors import ConfigError
from support import contract


def asked(*words: str) -> Any:
    return load(None, ["--run.dir=run", *words])


def test_vllm_has_one_drafter_the_first_that_it_can_run():
    auto, named = asked(), asked("--speculation.drafter=runs/a")
    assert vllm._one_of(["fresh", "history"], auto, has_drafters=True) == "fresh"
    assert vllm._one_of(["fresh", "history"], auto, has_drafters=False) == "fresh"
    assert vllm._one_of(["runs/a"], named, has_drafters=True) == "runs/a"
    assert vllm._one_of([], asked("--speculation.drafter=none"), has_drafters=False) is None
    with pytest.raises(ConfigError, match="set it to 'fresh', 'history' or 'none'"):
        vllm._one_of(["runs/a"], named, has_drafters=False)
    with pytest.raises(ConfigError, match="vLLM runs no class of yours"):
        vllm._one_of(["mine:Drafter"], named, has_drafters=True)


def test_a_fresh_drafter_is_learned_by_vllm_and_goes_on_where_the_run_has_one(tmp_path):
    new = asked(f"--run.dir={tmp_path}")
    assert vllm._learning(new, None, tmp_path / "unused") == {"drafter": "learned"}
    saved = tmp_path / "drafter" / "initial"
    fresh(contract.toy_target()).save(saved)
    found = vllm._learning(new, None, tmp_path / "unused")
    assert found == {"drafter": "learned", "begin": str(saved), "depth": 4}
    off = asked(f"--run.dir={tmp_path}", "--speculation.tuner=off")
    assert vllm._learning(off, None, tmp_path / "unused") == {}
    fixed = asked(f"--run.dir={tmp_path}", "--speculation.tuner=fixed")
    with pytest.raises(ConfigError, match=r"speculation\.tuner = 'fixed'"):
        vllm._learning(fixed, None, tmp_path / "unused")
