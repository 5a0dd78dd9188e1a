"""Mistakes of users: each has its message and its exit code, never a traceback."""

import shutil

import pytest
import torch

from end_to_end.workshop import PLAIN, Said, Workshop, build
from longtail.model.hf.model import save_model
from support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("workshop"), PLAIN)


def _assert_refused(said: Said, code: int, *parts: str) -> None:
    assert said.code == code, said.err
    assert said.out == ""
    assert "Traceback" not in said.err
    message = said.err[said.err.rindex("longtail: ") :]
    for part in parts:
        assert part in message


@pytest.mark.slow
def test_a_model_that_cannot_be_used_is_refused_and_its_run_begins_once_it_is_mended(
    workshop, tmp_path
):
    model, run = tmp_path / "model", tmp_path / "run"
    shutil.copytree(workshop.model, model)
    broken = tiny_model()
    with torch.no_grad():
        broken.layers[1].feed_forward.down.weight[3, 4] = float("nan")
    save_model(broken, model)
    words = (f"--model.path={model}", f"--run.dir={run}")
    reason = "model.layers.1.mlp.down_proj.weight holds 1 values that are NaN or infinite"
    _assert_refused(workshop.train("unused", *words), 2, reason)
    assert not list((run / "checkpoints").iterdir())
    shutil.rmtree(model)
    shutil.copytree(workshop.model, model)
    quick = ("--run.steps=1", "--rollout.max_tokens=2", "--data.heldout_size=0")
    assert workshop.train("unused", *words, *quick).code == 0


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
    _assert_refused(workshop.train("unused", *words), 2, *parts)
