"""`longtail sft`: training, resume and refusals."""

import json
from pathlib import Path

import pytest
import torch

from longtail.config import files as configfile
from longtail.config import sft as sft_config
from longtail.errors import ConfigError, DataError
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.programs import sft
from longtail.run.checkpoint import RunDirectory
from support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(1, 9) for b in range(1, 9)]


@pytest.fixture
def place(tmp_path) -> Path:
    words = tiny_tokenizer()
    model = tiny_model(vocab_size=words.vocab_size)
    save_model(model, tmp_path / "model", eos_ids=words.eos_ids)
    words.save(tmp_path / "model")
    text = "\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "sums.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def settings(place: Path, name: str, *words: str) -> sft_config.SftConfig:
    return configfile.resolve(
        sft_config.SftConfig,
        None,
        [
            f"--model.path={place / 'model'}",
            f"--data.source={place / 'sums.jsonl'}",
            f"--run.dir={place / name}",
            "--run.threads=1",
            "--data.max_len=64",
            "--train.batch_tokens=64",
            "--train.learning_rate=0.01",
            "--train.autocast=false",
            "--train.warmup_steps=2",
            "--train.schedule=constant",
            "--run.checkpoint_every=3",
            "--train.steps=6",
            *words,
        ],
    )


def learned(place: Path, name: str) -> dict[str, torch.Tensor]:
    checkpoint = RunDirectory(place / name).load_latest()
    assert checkpoint is not None
    return dict(load_model(checkpoint.policy).named_parameters())


def metrics(place: Path, name: str) -> list[dict]:
    lines = (place / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clocked = "perf/tokens_per_s"
    return [{k: v for k, v in json.loads(line).items() if k != clocked} for line in lines]


@pytest.mark.slow
def test_fine_tuning_lowers_the_loss_and_saves_a_model(place, capsys):
    assert sft.run(settings(place, "run", "--train.steps=30", "--run.log_every=10")) == 0
    rows = metrics(place, "run")
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-1]["train/loss"] < 0.7 * rows[0]["train/loss"]
    held = [row["heldout/loss"] for row in rows if "heldout/loss" in row]
    assert len(held) == 10
    assert held[-1] < held[0]
    said = capsys.readouterr().err
    assert "step 30/30" in said
    assert "checkpoints/step_000030/policy" in said
    policy = place / "run" / "checkpoints" / "step_000030" / "policy"
    assert load_tokenizer(policy).encode("1+1=") == tiny_tokenizer().encode("1+1=")


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(place):
    assert sft.run(settings(place, "whole")) == 0
    assert sft.run(settings(place, "parts", "--train.steps=3")) == 0
    assert sft.run(settings(place, "parts")) == 0
    expected = learned(place, "whole")
    for name, value in learned(place, "parts").items():
        assert torch.equal(value, expected[name]), name
    assert metrics(place, "parts") == metrics(place, "whole")


def test_a_run_keeps_the_time_of_its_start_and_its_chat_template(place):
    template, begun = place / "model" / "chat_template.jinja", []
    template.write_text("{{ strftime_now('%H:%M:%S.%f') }}" + CHAT_TEMPLATE)
    for steps in (3, 6):
        assert sft.run(settings(place, "run", f"--train.steps={steps}")) == 0
        checkpoint = RunDirectory(place / "run").load_latest()
        begun.append(checkpoint and checkpoint.begun)
    assert begun[0] == begun[1] != ""
    template.write_text(CHAT_TEMPLATE)
    with pytest.raises(DataError, match="the run began with another chat template"):
        sft.run(settings(place, "run", "--train.steps=9"))


def test_a_system_prompt_is_part_of_the_examples(place):
    examples = sft.assemble(settings(place, "run", "--data.system_prompt=So.")).batches.take()
    assert all(tiny_tokenizer().decode(each.tokens).startswith("<system>So.") for each in examples)


@pytest.mark.parametrize(
    ("word", "error", "message"),
    [
        ("--data.chat_template_kwargs={x = 1}", ConfigError, "reads no such argument"),
        ("--data.source=gone.jsonl", DataError, "does not exist"),
        ("--data.completion_column=answers", DataError, "no completion column"),
        ("--data.max_len=3", DataError, r"data\.max_len is 3"),
        ("--data.max_len=4096", ConfigError, r"data\.max_len = 4096: the model has 512"),
        ("--model.path=nowhere", ConfigError, "nowhere"),
    ],
)
def test_bad_input_is_refused_before_any_training(place, word, error, message):
    with pytest.raises(error, match=message):
        sft.run(settings(place, "run", word))
