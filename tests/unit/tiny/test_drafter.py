"""The tiny reasoner's drafter: trained once, kept whole, of the target it was asked for."""

from pathlib import Path

import pytest

from longtail.drafter.formats.checkpoint import load_drafter
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.tiny import drafter, warmstart
from longtail.tiny.drafter import Lesson, Lessons


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An untaught tiny reasoner, and lessons of a second."""
    short = {"problems": 6, "heldout": 2, "max_tokens": 24, "steps": 2}
    lessons = {
        "eagle1": Lessons(recipe="eagle1", unroll_steps=2, **short),
        "eagle3": Lessons(recipe="eagle3", unroll_steps=3, **short),
    }
    monkeypatch.setattr(drafter, "LESSONS", lessons)
    directory, tokenizer = tmp_path / "reasoner", warmstart.load_tokenizer()
    save_model(warmstart.fresh(0), directory, eos_ids=tokenizer.eos_ids)
    tokenizer.save(directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_it_is_trained_once_and_found_again(target: Path, tmp_path: Path, recipe: str) -> None:
    told: list[Lesson] = []
    first = drafter.ensure(target, told.append, cache_dir=tmp_path, recipe=recipe)
    assert [lesson.step for lesson in told] == [1, 2]
    assert "expected accept length" in told[0].line()
    assert drafter.ensure(target, told.append, cache_dir=tmp_path, recipe=recipe) == first
    assert len(told) == 2
    model, tokenizer = load_model(target), load_tokenizer(target)
    loaded = load_drafter(first, model, tokenizer, strict_weights=True)
    assert loaded.layer.config.recipe == recipe
    assert len(loaded.training.overlap) == 6
    assert [path.name for path in (tmp_path / "tiny-drafter").iterdir()] == [first.name]


@pytest.mark.slow
def test_another_target_has_another_drafter(target: Path, tmp_path: Path) -> None:
    first = drafter.ensure(target, cache_dir=tmp_path)
    moved = target.rename(tmp_path / "other")
    assert drafter.ensure(moved, cache_dir=tmp_path) != first


def test_a_training_that_fails_leaves_nothing(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "save_drafter", None)
    with pytest.raises(TypeError):
        drafter.ensure(target, cache_dir=tmp_path)
    assert not list((tmp_path / "tiny-drafter").iterdir())
