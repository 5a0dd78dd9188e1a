"""Law 8: resuming is invisible. k steps, stop, resume, k steps = 2k steps, bit for bit.

Kills, and signals wherever a run is: end_to_end/chaos.py.
"""

import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from end_to_end.workshop import PLAIN, Workshop, build

STEPS = 3
QUICK = (
    f"--run.steps={STEPS}",
    "--run.checkpoint_every=100",
    "--rollout.max_tokens=10",
    "--learner.mini_batches=2",
)
EVALUATED = 8  # completions of an evaluation: 4 held-out problems x 2
GRADED = 16  # completions of a step: 4 prompts x 4

VARIANTS = {
    "KL to the initial policy, schedule, decay, tied embeddings, bfloat16, one update a step": (
        EVALUATED + GRADED + 5,  # in step 2, which then completes
        [
            "--model.path=tied",
            "--learner.mini_batches=1",
            "--learner.loss=reinforce_pp",
            "--learner.kl_coef=0.1",
            "--learner.schedule=cosine",
            "--learner.warmup_steps=2",
            "--learner.weight_decay=0.1",
            "--learner.gradient_checkpointing=true",
            "--rollout.dtype=bfloat16",
            "--learner.autocast=true",
        ],
    ),
    "transformers' code, dynamic sampling, penalty, importance cap, truncation": (
        EVALUATED + 3 * GRADED + 5,  # in the second round of step 2
        [
            "--learner.model=transformers",
            "--learner.gradient_checkpointing=true",
            "--learner.loss=dapo",
            "--learner.max_refills=1",
            "--learner.overlong_buffer=4",
            "--learner.tis_cap=2.0",
            "--rollout.top_p=0.95",
            "--rollout.temperature=0.9",
        ],
    ),
    "adapters, KL, several updates": (
        EVALUATED + GRADED + 5,
        [
            "--learner.lora.rank=16",
            "--learner.learning_rate=0.05",
            "--learner.kl_coef=0.01",
            "--learner.gradient_checkpointing=true",
        ],
    ),
}
"""Options of a run, and the call of the reward that interrupts it."""


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.chdir(tmp_path)
    return build(tmp_path, PLAIN)


@functools.cache
def _uninterrupted(*words: str) -> dict[str, Any]:
    """Return the outcome of a run that is not interrupted."""
    with tempfile.TemporaryDirectory() as place:
        workshop = build(Path(place), PLAIN)
        said = workshop.train("whole", *words)
        assert said.code == 0, said.err
        return workshop.outcome("whole", len(workshop.metrics("whole")))


def _interrupt_at(call: int) -> None:
    """Press Ctrl-C during the given call of the reward in this process."""
    Path("interrupt-at").write_text(f"{call} {os.getpid()}")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_was_interrupted_ends_like_one_that_was_not(workshop, variant):
    call, more = VARIANTS[variant]
    words = [*QUICK, "--reward.name=end_to_end.rewards:interrupting", *more]
    _interrupt_at(call)
    stopped = workshop.train("parts", *words)
    assert stopped.code == 130
    assert "stopped after step 2; the same command continues from there" in stopped.err
    assert workshop.steps_saved("parts") == [2]
    resumed = workshop.train("parts", *words)
    assert resumed.code == 0
    assert "resumed after step 2" in resumed.err
    ended = workshop.outcome("parts", STEPS)
    assert ended == _uninterrupted(*words)
    # The run learned after it was resumed, else equality would be cheap.
    assert ended["weights"] != workshop.outcome("parts", 2)["weights"]
    if "--learner.max_refills=1" in words:
        assert workshop.metrics("parts")[1]["rollout/rounds"] > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "left"),
    [
        (3, []),  # in the evaluation before the first step
        (EVALUATED + 2 * GRADED + 3, [2]),  # in the grading of that evaluation
    ],
)
def test_an_evaluation_may_be_interrupted_too(workshop, call, left):
    words = [*QUICK, "--eval.every=2", "--rollout.max_tokens=6"]
    words.append("--reward.name=end_to_end.rewards:interrupting")
    _interrupt_at(call)
    assert workshop.train("parts", *words).code == 130
    assert workshop.steps_saved("parts") == left
    assert workshop.train("parts", *words).code == 0
    assert workshop.outcome("parts", STEPS) == _uninterrupted(*words)
