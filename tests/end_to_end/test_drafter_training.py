"""`longtail drafter train` at toy size: what it leaves behind, how it resumes, what it refuses."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import Said, Workshop, build, read_lines, say, write_lines
from longtail.drafter.eagle.trainer import DrafterTrainer
from longtail.drafter.formats.checkpoint import load_drafter
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.run.drafter_store import drafter_directory

STEPS = 6


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Holds one finished run, `done`."""
    workshop = build(tmp_path_factory.mktemp("workshop"))
    said = _train(workshop, "done")
    assert said.code == 0, said.err
    assert "expected accept length" in said.out
    assert said.err.count("held out: overlap") == STEPS // 2
    return workshop


def _train(workshop: Workshop, run: str, *more: str) -> Said:
    eagle = ("--drafter.window=8", "--drafter.unroll_steps=3")
    return _train_ridge(workshop, run, f"--train.steps={STEPS}", *eagle, *more)


def _train_ridge(workshop: Workshop, run: str, *more: str) -> Said:
    return say(
        *("drafter", "train"),
        f"--target.path={workshop.model}",
        f"--data.source={workshop.prompts}",
        f"--run.dir={workshop.path / run}",
        *("--data.size=12", "--data.heldout_size=4", "--data.max_tokens=24", "--data.samples=2"),
        *("--target.dtype=float32", "--train.autocast=false"),
        *("--train.warmup_steps=1", "--run.checkpoint_every=2"),
        "--train.batch_tokens=100",
        *("--run.threads=1", "--run.device=cpu", "--run.log_every=1", *more),
    )


def _outcome(workshop: Workshop, run: str) -> dict[str, Any]:
    """Everything of a run that must not depend on when it was interrupted, to the last bit."""
    checkpoint = workshop.path / run / "checkpoints" / f"step_{STEPS:06d}"
    rows = workshop.metrics(run)
    return {
        "drafter": (checkpoint / "policy" / "drafter.safetensors").read_bytes(),
        "description": json.loads((checkpoint / "policy" / "drafter.json").read_text()),
        "optimizer": (checkpoint / "trainer.safetensors").read_bytes(),
        "state": json.loads((checkpoint / "state.json").read_text())["state"],
        "texts": (workshop.path / run / "texts.jsonl").read_bytes(),
        "metrics": [{n: v for n, v in r.items() if n != "perf/tokens_per_s"} for r in rows],
    }


def test_a_run_leaves_a_drafter_of_its_target(workshop):
    target, tokenizer = load_model(workshop.model), load_tokenizer(workshop.model)
    path = drafter_directory(workshop.path / "done")
    assert path == drafter_directory(path) == drafter_directory(path.parent)
    loaded = load_drafter(path, target, tokenizer, strict_weights=True)
    assert loaded.layer.config.window == 8
    assert loaded.training.steps == STEPS
    assert len(loaded.training.overlap) == 6
    assert sorted(p.name for p in path.iterdir()) == ["drafter.json", "drafter.safetensors"]
    rows = workshop.metrics("done")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["heldout/overlap_6"] == pytest.approx(loaded.training.overlap[5])
    assert rows[-1]["heldout/overlap_1"] > rows[1]["heldout/overlap_1"]
    texts = read_lines(workshop.path / "done" / "texts.jsonl")[1:]
    assert len(texts) == 24
    assert loaded.training.tokens == sum(row["train/tokens"] for row in rows)


def test_a_stopped_and_a_killed_run_go_on_bit_for_bit_without_writing_texts_anew(
    workshop, monkeypatch
):
    run, step = "stopped", DrafterTrainer.step

    def disturbed(trainer: DrafterTrainer, *batch: Any) -> Any:
        if trainer.steps == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        if trainer.steps == 3:
            raise MemoryError
        return step(trainer, *batch)

    monkeypatch.setattr(DrafterTrainer, "step", disturbed)
    said = _train(workshop, run)
    assert said.code == 130
    assert "stopped after step 1; start again to go on" in said.err
    monkeypatch.setattr("longtail.programs.drafter_data._generate", None)  # must not be needed
    with pytest.raises(MemoryError):
        _train(workshop, run)
    monkeypatch.setattr(DrafterTrainer, "step", step)
    said = _train(workshop, run)
    assert said.code == 0
    assert "resumed after step 2" in said.err
    assert _outcome(workshop, run) == _outcome(workshop, "done")


def test_a_run_that_is_stopped_while_texts_are_written_begins_again(workshop, monkeypatch):
    step, seen = "longtail.run.console.Console.rollout_step", []

    def terminated(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(step, terminated)
        said = _train(workshop, "early")
    assert (said.code, len(seen)) == (130, 3)
    assert "stopped before the first step" in said.err
    assert _train(workshop, "early").code == 0
    assert _outcome(workshop, "early") == _outcome(workshop, "done")


def test_a_reduced_vocabulary_holds_what_ends_a_text(workshop):
    said = _train(workshop, "reduced", "--drafter.draft_vocab_size=40", "--train.matrix_rate=0")
    assert said.code == 0, said.err
    target, tokenizer = load_model(workshop.model), load_tokenizer(workshop.model)
    path = drafter_directory(workshop.path / "reduced")
    loaded = load_drafter(path, target, tokenizer, strict_weights=True)
    assert loaded.draft_ids is not None
    assert len(loaded.draft_ids) == 40
    assert set(tokenizer.eos_ids) <= set(loaded.draft_ids.tolist())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--drafter.layers=0,9"], "drafter.layers = [0, 9]: "),
        (["--drafter.layers=1,0"], "must be in rising order"),
        (["--drafter.recipe=eagle1", "--drafter.layers=0,1"], "drafter.recipe = 'eagle1' has none"),
        (["--drafter.recipe=rigid"], "drafter.recipe = 'rigid': give one of eagle1, eagle3, ridge"),
        (["--drafter.draft_vocab_size=999"], "has 128 tokens; give fewer"),
        (["--data.heldout_size=12"], "none would be left to learn"),
        (["--data.source=short.jsonl", "--data.completions=given"], "none of its sequences has 5"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_remedy(workshop, monkeypatch, words, message):
    monkeypatch.chdir(workshop.path)
    write_lines(Path("short.jsonl"), {"text": "abc"})
    said = _train(workshop, "refused", *words)
    assert said.code == 2, said.err
    assert message in said.err
    assert not said.out


def test_a_dry_run_refuses_what_the_recipe_lacks(workshop):
    said = _train(workshop, "refused", "--drafter.recipe=ridge", "--drafter.window=9", "--dry-run")
    assert said.code == 2, said.out
    assert "drafter.window: drafter.recipe = 'ridge' has none; leave it out" in said.err


def test_a_run_is_not_gone_on_with_under_other_settings(workshop):
    said = _train(workshop, "done", "--drafter.window=16", "--train.steps=9")
    assert said.code == 2
    assert "drafter.window: 8 -> 16" in said.err
    assert "its steps are done" in _train(workshop, "done").err


def test_a_ridge_drafter_is_the_same_after_a_stop(workshop, monkeypatch):
    """Its training is a sum, which a stopped run continues."""
    options = ("--drafter.recipe=ridge", "--drafter.slots=3")
    step = RidgeTrainer.step

    def terminated(trainer: RidgeTrainer, *batch: Any) -> Any:
        if trainer.steps == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(trainer, *batch)

    assert _train_ridge(workshop, "ridge", *options).code == 0
    with monkeypatch.context() as patch:
        patch.setattr(RidgeTrainer, "step", terminated)
        assert _train_ridge(workshop, "ridge-stopped", *options).code == 130
    said = _train_ridge(workshop, "ridge-stopped", *options)
    assert said.code == 0, said.err
    assert "sums of a regression" in said.err
    assert _outcome(workshop, "ridge-stopped") == _outcome(workshop, "ridge")
