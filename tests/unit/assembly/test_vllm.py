"""`rollout.engine`: what generates, and what is refused before a run starts."""

import json
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from longtail.assembly import vllm
from longtail.assembly.drafters import fresh
from longtail.assembly.vllm import uses_vllm
from longtail.config.rl import load
from longtail.errors import ConfigError
from support import contract, toy


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "vocab_size": 9}))
    return tmp_path


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = object()
    monkeypatch.setattr(util, "find_spec", lambda name: found)
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")


def asked(*words: str) -> Any:
    return load(None, ["--run.dir=run", *words])


def test_auto_is_the_own_engine_where_it_has_the_family() -> None:
    assert not uses_vllm(asked(), toy.REASONER)
    assert not uses_vllm(asked("--rollout.engine=own"), toy.REASONER)


@pytest.mark.usefixtures("installed")
def test_other_families_need_vllm(foreign: Path) -> None:
    assert uses_vllm(asked(), foreign)
    assert uses_vllm(asked("--rollout.engine=vllm"), toy.REASONER)
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'own': .*olmo2.*set it to 'vllm'"):
        uses_vllm(asked("--rollout.engine=own"), foreign)


def test_without_vllm_one_sentence_says_what_to_install(foreign: Path, monkeypatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    for config, directory in ((asked(), foreign), (asked("--rollout.engine=vllm"), toy.REASONER)):
        with pytest.raises(ConfigError, match="pip install vllm"):
            uses_vllm(config, directory)


@pytest.mark.usefixtures("installed")
def test_another_release_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.40.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.40\.1 is installed, and 0\.32 or 0\.33"):
        uses_vllm(asked("--rollout.engine=vllm"), toy.REASONER)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--rollout.min_p=0.1",), "rollout.min_p = 0.1"),
        (("--learner.sharding=full", "--cluster.workers=2"), "learner.sharding = 'full'"),
        (("--speculation.tuner=fixed", "--speculation.width=2"), "speculation.width = 2"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        uses_vllm(asked("--rollout.engine=vllm", *words), toy.REASONER)


def test_vllm_has_one_drafter_the_first_that_it_can_run() -> None:
    auto, named = asked(), asked("--speculation.drafter=runs/a")
    assert vllm._one_of(["fresh", "history"], auto, has_drafters=True) == "fresh"
    assert vllm._one_of(["fresh", "history"], auto, has_drafters=False) == "fresh"
    assert vllm._one_of(["runs/a"], named, has_drafters=True) == "runs/a"
    assert vllm._one_of([], asked("--speculation.drafter=none"), has_drafters=False) is None
    with pytest.raises(ConfigError, match="set it to 'fresh', 'history' or 'none'"):
        vllm._one_of(["runs/a"], named, has_drafters=False)


def test_a_fresh_drafter_is_learned_by_vllm_and_goes_on_where_the_run_has_one(
    tmp_path: Path,
) -> None:
    new = asked(f"--run.dir={tmp_path}")
    assert vllm._learning(new, None, tmp_path / "unused") == {"drafter": "learned"}
    saved = tmp_path / "drafter" / "initial"
    target = contract.toy_target()
    fresh(target.name, target.model, target.tokenizer).save(saved)
    found = vllm._learning(new, None, tmp_path / "unused")
    assert found == {"drafter": "learned", "begin": str(saved), "depth": 4}
    off = asked(f"--run.dir={tmp_path}", "--speculation.tuner=off")
    assert vllm._learning(off, None, tmp_path / "unused") == {}
    fixed = asked(f"--run.dir={tmp_path}", "--speculation.tuner=fixed")
    with pytest.raises(ConfigError, match=r"speculation\.tuner = 'fixed'"):
        vllm._learning(fixed, None, tmp_path / "unused")
