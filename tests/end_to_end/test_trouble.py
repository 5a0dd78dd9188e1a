"""Failures before and during a run: a message and an exit code; its checkpoints stay usable."""

import contextlib
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from end_to_end.processes import finish, start, wait_until
from end_to_end.workshop import PLAIN, Said, Workshop, build, write_lines
from longtail.model.hf.model import load_model, save_model
from longtail.run.checkpoint import RunDirectory
from support.tiny_models import tiny_model

BEFORE_A_STEP = "stopped before the first step was complete; the same command starts again"


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    return build(tmp_path, PLAIN)


def _newest(workshop: Workshop, run: str) -> int:
    """Step of the newest checkpoint; every file of it has the digest it was written with."""
    checkpoint = RunDirectory(workshop.path / run).load_latest()
    assert checkpoint is not None
    load_model(checkpoint.policy)
    return checkpoint.step


def _assert_refused(said: Said, *parts: str) -> None:
    assert (said.code, said.out) == (2, ""), said.err
    assert "Traceback" not in said.err
    message = said.err[said.err.rindex("longtail: ") :]
    assert all(part in message for part in parts), message


@pytest.mark.slow
def test_a_model_that_cannot_be_used_is_refused_and_its_run_begins_once_it_is_mended(workshop):
    broken = tiny_model()
    with torch.no_grad():
        broken.layers[1].feed_forward.down.weight[3, 4] = float("nan")
    save_model(broken, workshop.model)
    reason = "model.layers.1.mlp.down_proj.weight holds 1 values that are NaN or infinite"
    _assert_refused(workshop.train("run"), reason)
    assert not list((workshop.path / "run" / "checkpoints").iterdir())
    save_model(tiny_model(), workshop.model)
    quick = ("--run.steps=1", "--rollout.max_tokens=2", "--data.heldout_size=0")
    assert workshop.train("run", *quick).code == 0


@pytest.mark.parametrize(
    ("rows", "words", "parts"),
    [
        (
            '{"prompt": "1"}\n' * 4,
            [],
            ["data.heldout_size = 4", "4 prompts, none would be left to train on"],
        ),
        (
            '{"prompt": "1", "answer": "7"}\n{"prompt": "2", "answer": NaN}\n',
            ["--reward.name=exact"],
            ["bad.jsonl', row 1, column 'answer'", "the reference answer of this row is nan"],
        ),
    ],
)
def test_data_that_cannot_be_used(workshop, tmp_path, rows, words, parts):
    file = tmp_path / "bad.jsonl"
    file.write_text(rows)
    words = [f"--data.source={file}", f"--run.dir={tmp_path / 'run'}", *words]
    _assert_refused(workshop.train("unused", *words), *parts)


@pytest.mark.slow
def test_completions_whose_reward_fails_are_left_out_and_counted(workshop):
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


def test_a_reward_that_always_fails_stops_the_run_with_its_error(workshop):
    said = workshop.train("hopeless", "--reward.name=end_to_end.rewards:hopeless")
    assert said.code == 1
    assert "all 8 completions" in said.err
    assert "ValueError: this reward is broken (rewards.py" in said.err
    assert "correct what reward.name = 'end_to_end.rewards:hopeless' computes" in said.err
    assert "Traceback" not in said.err
    assert not (workshop.path / "hopeless" / "summary.json").exists()


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_its_checkpoints(workshop):
    words = ("--reward.name=end_to_end.rewards:exploding", "--learner.loss=rloo")
    more = ("--data.heldout_size=0", "--run.steps=9", "--run.checkpoint_every=2")
    said = workshop.train("exploding", *words, *more)
    assert said.code == 1
    why = (
        r"stopped in step 4 of 9: the loss \(micro-batch \S+/0\) is not finite; no update was made;"
    )
    assert re.search(why, said.err)
    assert _newest(workshop, "exploding") == 2
    assert str(workshop.policy("exploding", 2)) in said.err
    assert "Traceback" not in said.err
    assert [row["step"] for row in workshop.metrics("exploding")] == [1, 2, 3]
    # The advice works.
    words = (f"--model.path={workshop.policy('exploding', 2)}", "--run.steps=1")
    assert workshop.train("another", *words).code == 0


def test_weights_that_an_update_broke_are_neither_used_nor_kept(workshop):
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


def test_logits_that_are_not_finite_name_the_request_and_the_policy(workshop):
    # Weights of 1e30 are finite, their products are not.
    words = ("--learner.learning_rate=1e30", "--run.steps=3", "--run.checkpoint_every=1")
    said = workshop.train("huge", *words)
    assert said.code == 1
    assert "stopped in step 2 of 3: logits of request" in said.err
    assert "are not finite under policy version 1" in said.err
    assert _newest(workshop, "huge") == 1


@contextlib.contextmanager
def full_disk(max_file_bytes: int) -> Iterator[None]:
    """Refuse to write beyond this length of a file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.slow
def test_a_full_disk_costs_the_new_checkpoint_only(workshop):
    words = ("--run.steps=4", "--run.checkpoint_every=2")
    assert workshop.train("whole", *words).code == 0
    assert workshop.train("full", *words, "--run.steps=2").code == 0
    # Weights take 120 kB and fit; the optimizer's moments are twice as long.
    with full_disk(200_000):
        said = workshop.train("full", *words)
    assert said.code == 1
    assert "checkpoint of step 4" in said.err
    assert "free some space" in said.err
    assert "Traceback" not in said.err
    assert _newest(workshop, "full") == 2
    assert os.listdir(workshop.path / "full" / "checkpoints") == ["step_000002"]
    assert workshop.train("full", *words).code == 0
    assert workshop.outcome("full", 4) == workshop.outcome("whole", 4)


@pytest.mark.slow
def test_a_signal_while_a_run_is_being_set_up_ends_it_with_a_word(workshop):
    """In a process of its own, whose end closes what was being opened."""
    for number in (signal.SIGINT, signal.SIGHUP):
        name = f"early-{number}"
        log, config = workshop.path / f"{name}.log", workshop.path / name / "config.toml"
        process = start(workshop.words(name, "--run.steps=1000"), log)
        assert wait_until(config.exists, process)
        assert process.pid is not None
        os.kill(process.pid, number)
        assert finish(process) == 130, log.read_text()
        said = log.read_text()
        assert said.splitlines()[-1] in ("longtail: interrupted", BEFORE_A_STEP)
        assert "Traceback" not in said
