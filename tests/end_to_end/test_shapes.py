"""Whole runs in which the shapes of every call are checked: conftest.py says why these alone."""

import pytest

from end_to_end.workshop import save_untaught

pytestmark = [pytest.mark.shapes, pytest.mark.slow]
CHECKPOINTING = "--learner.gradient_checkpointing=true"
BRIEF = ("--run.steps=2", "--rollout.max_tokens=6", "--data.heldout_size=2")


@pytest.mark.parametrize(
    "words",
    [
        ("--model.path=tied", "--learner.loss=gspo", "--rollout.dtype=bfloat16"),
        ("--speculation.drafter=drafter", "--learner.kl_coef=0.1", CHECKPOINTING),
    ],
    ids=["tied", "drafter"],
)
def test_every_shape_of_a_training_run_is_what_the_annotations_say(
    workshop, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(workshop.path)
    if not (workshop.path / "drafter").exists():
        save_untaught(workshop.model, workshop.path / "drafter")
    said = workshop.train(str(tmp_path / "run"), *BRIEF, *words)
    assert said.code == 0, said.err
