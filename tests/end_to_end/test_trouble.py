"""Failures during a run: it stops with a message, and its checkpoints stay usable."""

import os
import re
import signal
from pathlib import Path

import pytest

from end_to_end import processes
from end_to_end.workshop import Workshop, build, write_lines
from longtail.model.hf.model import load_model
from longtail.run.checkpoint import RunDirectory

BEFORE_A_STEP = "stopped before the first step was complete; the same command starts again"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return build(tmp_path)


def _newest(workshop: Workshop, run: str) -> int:
    """Step of the newest checkpoint; every file of it has the digest it was written with."""
    checkpoint = RunDirectory(workshop.path / run).load_latest()
    assert checkpoint is not None
    load_model(checkpoint.policy)
    return checkpoint.step


@pytest.mark.slow
def test_completions_whose_reward_fails_are_left_out_and_counted(workshop: Workshop) -> None:
    troubles = ["none", "forks", "raises", "hangs", "returns too many", "returns NaN"]
    write_lines(workshop.prompts, *({"prompt": t, "trouble": t} for t in troubles))
    said = workshop.train(
        "troubled",
        "--reward.name=end_to_end.rewards:troubled",
        "--reward.timeout_s=0.3",
        "--reward.workers=2",
        "--rollout.prompts_per_step=6",
        "--rollout.group_size=2",
        "--data.heldout_size=0",
        "--run.steps=1",
    )
    assert said.code == 0
    assert said.err.count("  8 ungraded") == 1
    assert "Traceback" not in said.err
    for row in workshop.metrics("troubled"):
        assert row["reward/failures"] == 8
        assert row["reward/min"] >= 0
    rollouts = workshop.rollouts("troubled")
    graded = [line["prompt_id"] for line in rollouts]
    assert sorted(graded) == ["prompts/0"] * 2 + ["prompts/1"] * 2  # without trouble, and forked
    first = [line["reward"] for line in rollouts if line["step"] == 1]
    assert workshop.metrics("troubled")[0]["reward/mean"] == pytest.approx(sum(first) / 4)


def test_a_reward_that_always_fails_stops_the_run_with_its_error(workshop: Workshop) -> None:
    said = workshop.train("hopeless", "--reward.name=end_to_end.rewards:hopeless")
    assert said.code == 1
    assert "all 8 completions" in said.err
    assert "ValueError: this reward is broken (rewards.py" in said.err
    assert "fix reward.name = 'end_to_end.rewards:hopeless'" in said.err
    assert "Traceback" not in said.err
    assert not (workshop.path / "hopeless" / "summary.json").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoints(
    workshop: Workshop,
) -> None:
    words = ("--reward.name=end_to_end.rewards:exploding", "--learner.loss=rloo")
    more = ("--data.heldout_size=0", "--run.steps=9", "--run.checkpoint_every=2")
    said = workshop.train("exploding", *words, *more)
    assert said.code == 1
    assert "stopped in step 4 of 9: " in said.err
    assert re.search(r"the loss \(micro-batch \S+/0\) is not finite; no update was made", said.err)
    assert _newest(workshop, "exploding") == 2
    assert str(workshop.policy("exploding", 2)) in said.err
    assert "Traceback" not in said.err
    assert [row["step"] for row in workshop.metrics("exploding")] == [1, 2, 3]
    # The advice works.
    words = (f"--model.path={workshop.policy('exploding', 2)}", "--run.steps=1")
    assert workshop.train("another", *words).code == 0


def test_weights_that_an_update_broke_are_neither_used_nor_kept(workshop: Workshop) -> None:
    # The first update multiplies by 1 - rate * decay: 1e30 * 1e30 is beyond float32.
    words = ("--learner.learning_rate=1e30", "--learner.weight_decay=1e30", "--run.steps=3")
    said = workshop.train("broken", *words, "--run.checkpoint_every=1")
    assert said.code == 1
    assert (
        "stopped in step 1 of 3: model.embed_tokens.weight is not finite in policy version 1"
        in said.err
    )
    assert workshop.steps_saved("broken") == []
    assert f"model.path = '{workshop.model}'" in said.err


def test_logits_that_are_not_finite_name_the_request_and_the_policy(workshop: Workshop) -> None:
    # Weights of 1e30 are finite, their products are not.
    words = ("--learner.learning_rate=1e30", "--run.steps=3", "--run.checkpoint_every=1")
    said = workshop.train("huge", *words)
    assert said.code == 1
    assert "stopped in step 2 of 3: logits of request" in said.err
    assert "are not finite under policy version 1" in said.err
    assert _newest(workshop, "huge") == 1


@pytest.mark.slow
def test_a_full_disk_costs_the_new_checkpoint_only(workshop: Workshop) -> None:
    log = workshop.path / "log"
    kept = ("--run.checkpoint_every=2", "--speculation.drafter=history")
    words = workshop.words("full", "--run.steps=4", *kept)
    assert workshop.train("whole", *words[1:], f"--run.dir={workshop.path / 'whole'}").code == 0
    assert workshop.train("full", "--run.steps=2", *kept).code == 0
    # Weights take 120 kB and fit; the optimizer's moments are twice as long.
    assert processes.finish(processes.start(words, log, max_file_bytes=200_000)) == 1
    said = log.read_text()
    assert "checkpoint of step 4" in said
    assert "free some space" in said
    assert "Traceback" not in said
    assert _newest(workshop, "full") == 2
    assert os.listdir(workshop.path / "full" / "checkpoints") == ["step_000002"]
    assert processes.finish(processes.start(words, log)) == 0
    assert workshop.outcome("full", 4) == workshop.outcome("whole", 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_while_a_run_is_being_set_up_ends_it_with_a_word(
    workshop: Workshop, number: signal.Signals
) -> None:
    log = workshop.path / "log"
    process = processes.start(workshop.words("early", "--run.steps=1000"), log)
    config = workshop.path / "early" / "config.toml"
    assert processes.wait_until(config.exists, process), log.read_text()
    assert process.pid is not None
    os.kill(process.pid, number)
    assert processes.finish(process) == 130
    assert log.read_text().splitlines()[-1] in ("longtail: interrupted", BEFORE_A_STEP)
    assert "Traceback" not in log.read_text()
