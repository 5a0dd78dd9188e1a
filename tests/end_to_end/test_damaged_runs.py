"""A run directory that was damaged or edited: a sentence, and nothing is lost without one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from end_to_end.workshop import Workshop, build
from longtail.config.rl import RunConfig
from longtail.engine.rollout_log import read_rollout
from longtail.errors import LongtailError
from longtail.report.page import render
from longtail.run.checkpoint import RunDirectory
from longtail.run.logger import RunLogger
from longtail.run.summary import finished_summary, read_metrics, summarize_run

WORDS = (
    *("--run.steps=4", "--run.checkpoint_every=2", "--rollout.max_tokens=8"),
    *("--data.heldout_size=0", "--speculation.drafter=history"),
)
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A workshop with a finished run, `whole`."""
    workshop = build(tmp_path_factory.mktemp("workshop"))
    done = workshop.train("whole", *WORDS)
    assert done.code == 0, done.err
    return workshop


@pytest.fixture
def run(workshop: Workshop, tmp_path: Path) -> Path:
    """A copy of that run, to be damaged."""
    return Path(shutil.copytree(workshop.path / "whole", tmp_path / "run"))


def _train(workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture, *more: str) -> str:
    """Go on with a run; return the exit code and what was said, which is never a traceback."""
    caplog.clear()
    said = workshop.train(str(run), *WORDS, *more)
    assert "Traceback" not in said.err
    return f"{said.code}: {caplog.text}{said.err}"


def _newest(run: Path) -> Path:
    return run / "checkpoints" / "step_000004"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cursor", "seconds", "step"])
def test_an_edited_state_is_not_used(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    file = _newest(run) / "state.json"
    document = json.loads(file.read_text())
    if name == "cursor":
        document["state"]["cursor"] = {key: 0 for key in document["state"]["cursor"]}
    elif name == "seconds":
        document["state"]["seconds"] = 1e9
    else:
        document["step"] = 3
    file.write_text(json.dumps(document))
    said = _train(workshop, run, caplog, "--run.steps=5")
    assert "state.json does not have the SHA-256 it was written with" in said
    assert "resumed after step 2" in said
    assert workshop.summary(str(run))["seconds"] < 1e6
    assert [row["step"] for row in workshop.metrics(str(run))] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_checkpoint_under_the_name_of_another_step_is_not_used(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _newest(run).rename(_newest(run).with_name("step_000009"))
    said = _train(workshop, run, caplog, "--run.steps=5")
    assert "state.json is of another step" in said
    assert "resumed after step 2" in said


@pytest.mark.slow
def test_logs_without_a_checkpoint_are_kept_aside(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")}
    for turn in (1, 2):
        shutil.rmtree(run / "checkpoints")
        said = _train(workshop, run, caplog)
        assert "no checkpoint is left, so the run begins at step 0" in said
        assert str(run / f"earlier-{turn}") in said
        assert [row["step"] for row in workshop.metrics(str(run))] == [1, 2, 3, 4]
    assert {name: (run / "earlier-1" / name).read_bytes() for name in kept} == kept
    assert (run / "earlier-2" / "summary.json").exists()


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in run.glob("checkpoints/*/state.json"):
        path.write_text("{}")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = _train(workshop, run, caplog, "--run.steps=5")
    assert said.startswith("2: ")
    assert "none of its 2 checkpoints can be used (see above)" in said
    assert "step_000004 is damaged and skipped: state.json is not what was written" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    (run / "checkpoints").rename(run.with_name("away"))
    assert "begins at step 0" in _train(workshop, run, caplog)


@pytest.mark.parametrize("text", ["[run", "[run]\nsteps = 4", None])
def test_a_run_whose_configuration_is_damaged_or_gone_is_refused(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    (run / "config.toml").unlink()
    if text is not None:
        (run / "config.toml").write_text(text)
    said = _train(workshop, run, caplog, "--run.steps=5")
    assert said.startswith("2: ")
    assert "config.toml: it says how the run was begun" in said or "was begun with" in said


def _directory(path: Path) -> None:
    _away(path)
    path.mkdir()


def _file(path: Path) -> None:
    _away(path)
    path.write_text("a file")


def _away(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, Damage] = {
    "is a folder": _directory,
    "is gone": _away,
    "is empty": lambda path: path.write_bytes(b"") and None,
    "is cut in half": _half,
    "is no UTF-8": lambda path: path.write_bytes(b'{"step": 1, "\xff": "\xfe"}\n' * 3) and None,
    "is nested": lambda path: path.write_bytes(b'{"step":' + b"[" * 200_000 + b"\n") and None,
    "is JSON": lambda path: path.write_bytes(b'[{"step": 1e999, "a": null}, 3]\n') and None,
    "has other types": lambda path: (
        path.write_bytes(b'{"step": 1, "kind": "training", "seconds": "x", "args": 3},\n') and None
    ),
}
FILES = (
    *("config.toml", "metrics.jsonl", "rollouts.jsonl", "speculation.jsonl", "trace.json"),
    *("summary.json", "cost.json", "checkpoints/step_000004/state.json"),
    *("checkpoints/step_000004/trainer.safetensors", "checkpoints/step_000004/policy/config.json"),
)


def _go_on(run: Path, config_text: str, steps: int) -> None:
    """Read whatever a resumed run and its end read; raise what they raise."""
    with RunDirectory(run) as directory:
        checkpoint = directory.start(config_text, resume=True)
        if summary := finished_summary(run, checkpoint, steps):
            summary.lines(run)
        RunLogger(RunConfig(), run, last_step=checkpoint and checkpoint.step).close()
        rows = read_metrics(run / "metrics.jsonl")
        summarize_run(rows, steps=steps, reward_after=None, seconds=1.0, warm_start_s=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_file_that_is_damaged_leads_to_a_sentence_or_does_not_matter(
    run: Path, damage: str, name: str
) -> None:
    config_text = (run / "config.toml").read_text()
    DAMAGES[damage](run / name)
    for read in (
        lambda: render(run, read_rollout(run / "speculation.jsonl"), ""),
        lambda: _go_on(run, config_text, 4),
    ):
        sentence = str(run)
        try:
            read()
        except LongtailError as error:
            sentence = str(error)
        assert str(run) in sentence


@pytest.mark.parametrize("name", ["checkpoints", "drafter", "tensorboard", ".lock", "rollout.png"])
def test_a_file_in_a_folders_place_and_the_other_way_round_are_named(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (_directory if "." in name else _file)(run / name)
    said = _train(workshop, run, caplog, "--run.steps=5")
    assert said.startswith("2: ")
    kind = "a file" if "." in name else "a folder"
    assert f"{name} in it is not {kind}; move it away" in said
