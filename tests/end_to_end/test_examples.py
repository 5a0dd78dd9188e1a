"""The examples run as a user runs them, for less time; those of TRL are in test_trl.py."""

import json
import os
import re
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import longtail
from end_to_end.workshop import read_lines, say
from longtail import RunConfig
from support import toy

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RUNNING = ("test_examples.py", "test_trl.py")
"""Files of this folder that run examples."""


@pytest.fixture
def in_toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go to a folder where the toy has the name `smollm2`: a directory wins over a model."""
    monkeypatch.chdir(tmp_path)
    Path("smollm2").symlink_to(toy.REASONER)


def changed(function: Callable[..., Any], section: str, **values: object) -> Callable[..., Any]:
    """Return a function of a configuration that is called with other values of a section."""

    def called(config: RunConfig, **more: Any) -> Any:
        own = getattr(config, section).model_copy(update=values)
        return function(config.model_copy(update={section: own}), **more)

    return called


def test_the_table_names_every_example_and_every_example_is_run():
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"README.md"}
    assert set(re.findall(r"\]\(([\w.]+)\)", table)) == names
    running = "".join((Path(__file__).parent / name).read_text() for name in RUNNING)
    assert not [name for name in names if f'"{Path(name).stem}' not in running]


@pytest.mark.slow
@pytest.mark.usefixtures("in_toys")
def test_the_engine_answers_in_ten_lines(capsys):
    runpy.run_path(str(EXAMPLES / "engine.py"))
    assert capsys.readouterr().out.count(" tokens, ") == 2
    code = (EXAMPLES / "engine.py").read_text().rpartition('"""')[2]
    assert len(code.strip().splitlines()) <= 10


@pytest.mark.slow
@pytest.mark.usefixtures("in_toys")
def test_the_loop_in_one_file_learns_the_same_with_and_without_a_drafter(capsys):
    code = (EXAMPLES / "rl_loop.py").read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 150
    rewards = []
    for drafter in ("auto", "none"):
        names = runpy.run_path(str(EXAMPLES / "rl_loop.py"))
        names["main"].__globals__.update(PROMPTS=2, SAMPLES=4, MAX_TOKENS=12)
        one_thread = changed(longtail.open_workers, "run", threads=1)
        names["main"].__globals__["open_workers"] = one_thread
        rewards.append(names["main"](2, f"runs/{drafter}", drafter))
    assert rewards[0] == rewards[1]
    assert capsys.readouterr().out.count("step ") == 4


@pytest.mark.slow
def test_a_reward_in_the_example_grades_the_completions(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)  # as Python does for a script
    example = runpy.run_path(str(EXAMPLES / "own_reward.py"))
    assert example["short_answer"](["3 + 4 = 7.", "8"], ["7", "7"]) == [1.4975, 0]
    example["main"].__globals__["train"] = changed(longtail.train, "data", heldout_size=0)
    assert example["main"](str(tmp_path / "run"), str(toy.REASONER), steps=1, threads=1) == 0
    rewards = [row["reward"] for row in read_lines(tmp_path / "run" / "rollouts.jsonl")]
    assert len(rewards) == 16
    assert all(reward == 0 or 1 < reward < 1.5 for reward in rewards)
    (row,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert row["reward/failures"] == 0


@pytest.mark.slow
def test_a_parquet_file_in_the_columns_of_gsm8k_is_trained_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(EXAMPLES / "gsm8k_parquet.py"))["main"]
    main.__globals__["train"] = changed(longtail.train, "data", heldout_size=0)
    assert main("", str(toy.REASONER), steps=1, threads=1) == 0
    assert Path("runs/gsm8k.parquet").exists()
    (row,) = read_lines(Path("runs/gsm8k/metrics.jsonl"))
    assert row["reward/failures"] == 0
    for each in read_lines(Path("runs/gsm8k/rollouts.jsonl")):
        prompt, text = (
            list(map(int, re.findall(r"\d+", each[name]))) for name in ("prompt", "text")
        )
        assert each["reward"] == (text[-1:] == [sum(prompt)])


@pytest.mark.slow
def test_a_drafter_is_trained_and_exported_for_vllm(workshop, tmp_path, monkeypatch):
    """The script calls a `longtail` that writes its words down; here they are run."""
    stub, log = tmp_path / "longtail", tmp_path / "words"
    stub.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >> {log}\necho >> {log}\n')
    stub.chmod(0o755)
    more = ("--data.max_tokens=8", "--data.heldout_size=2", "--run.threads=1")
    script = ("bash", str(EXAMPLES / "drafter_for_vllm.sh"))
    subprocess.run(
        (*script, str(workshop.model), "drafter", str(workshop.prompts), *more),
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        check=True,
    )
    monkeypatch.chdir(workshop.path)
    commands = [line.split("\t")[:-1] for line in log.read_text().splitlines()]
    assert [words[1] for words in commands] == ["train", "eval", "export"]
    for words in commands:
        said = say(*words)
        assert said.code == 0, said.err
    exported = {path.name for path in (workshop.path / "drafter-vllm").iterdir()}
    assert exported == {"config.json", "model.safetensors"}


@pytest.mark.slow
def test_the_notebook_plots_a_run(workshop, monkeypatch, tmp_path):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    said = workshop.train("plotted", "--run.steps=2")
    assert said.code == 0, said.err
    monkeypatch.setenv("RUN", str(workshop.path / "plotted"))
    notebook = json.loads((EXAMPLES / "plot_run.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in cells))
    drawn: dict[str, Any] = runpy.run_path(str(script))
    figures = [plt.figure(number) for number in plt.get_fignums()]
    titles = [axes.get_title() for figure in figures for axes in figure.axes]
    plt.close("all")
    assert titles == [
        *("Mean reward", "Length of completions", "Completions of all steps"),
        *("Seconds of a step", "Accept length", "Step 2"),
    ]
    assert [row["step"] for row in drawn["metrics"]] == [1, 2]
