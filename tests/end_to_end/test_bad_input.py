"""Mistakes of users: each has its message and its exit code, never a traceback."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from end_to_end.workshop import PLAIN, Said, Workshop, build, write_lines
from longtail.model.hf.model import save_model
from support.tiny_models import tiny_model

Change = Callable[[Path], None]


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


def _with_nan(model: Path) -> None:
    broken = tiny_model()
    with torch.no_grad():
        broken.layers[1].feed_forward.down.weight[3, 4] = float("nan")
    save_model(broken, model)


MODELS: dict[str, tuple[Change, int, list[str]]] = {
    "no weights": (
        lambda model: (model / "model.safetensors").unlink(),
        2,
        ["holds no model.safetensors"],
    ),
    "NaN in the weights": (
        _with_nan,
        2,
        ["model.layers.1.mlp.down_proj.weight holds 1 values that are NaN or infinite"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_used(workshop, tmp_path, case):
    change, code, parts = MODELS[case]
    model = tmp_path / "model"
    shutil.copytree(workshop.model, model)
    change(model)
    run = tmp_path / "run"
    words = (f"--model.path={model}", f"--run.dir={run}")
    _assert_refused(workshop.train("unused", *words), code, *parts)
    assert not list((run / "checkpoints").iterdir())
    if case != "NaN in the weights":  # the last that is found
        return
    # Nothing is left in the way of the same command once the model is mended.
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(workshop.model, model)
    quick = ("--run.steps=1", "--rollout.max_tokens=2", "--data.heldout_size=0")
    assert workshop.train("unused", *words, *quick).code == 0


DATA: dict[str, tuple[list[dict[str, object]] | str | None, list[str], list[str]]] = {
    "no file": (None, [], ["data.source", "bad.jsonl does not exist"]),
    "too few rows": (
        [{"prompt": "1"}] * 4,
        [],
        ["data.heldout_size = 4", "4 prompts, none would be left to train on"],
    ),
    "without reference answers": (
        '{"prompt": "1", "answer": "7"}\n{"prompt": "2", "answer": NaN}\n',
        ["--reward.name=exact"],
        ["bad.jsonl', row 1, column 'answer'", "the reference answer of this row is nan"],
    ),
}


@pytest.mark.parametrize("case", DATA)
def test_data_that_cannot_be_used(workshop, tmp_path, case):
    rows, words, parts = DATA[case]
    file = tmp_path / "bad.jsonl"
    if isinstance(rows, str):
        file.write_text(rows)
    elif rows is not None:
        write_lines(file, *rows)
    words = [f"--data.source={file}", f"--run.dir={tmp_path / 'run'}", *words]
    _assert_refused(workshop.train("unused", *words), 2, *parts)
