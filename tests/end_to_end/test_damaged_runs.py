"""A run directory that was damaged or edited: a sentence, and nothing is lost without one."""

import shutil
from pathlib import Path

import pytest

from end_to_end.workshop import Workshop, build

WORDS = (
    *("--run.steps=2", "--run.checkpoint_every=1", "--rollout.max_tokens=8"),
    *("--data.heldout_size=0", "--speculation.drafter=history"),
)


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


@pytest.mark.slow
def test_logs_without_a_checkpoint_are_kept_aside(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "rollouts.jsonl")}
    for turn in (1, 2):
        shutil.rmtree(run / "checkpoints")
        said = _train(workshop, run, caplog)
        assert "it has no checkpoint, so the run begins at step 0" in said
        assert str(run / f"earlier-{turn}") in said
        assert [row["step"] for row in workshop.metrics(str(run))] == [1, 2]
    assert {name: (run / "earlier-1" / name).read_bytes() for name in kept} == kept
    assert (run / "earlier-2" / "summary.json").exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used_without_it(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "checkpoints" / "step_000002"
    (newest / "state.json").write_text("{")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = _train(workshop, run, caplog, "--run.steps=3")
    assert f"{newest}: it cannot be read" in said
    assert "move it away to use the one before" in said
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    newest.rename(run / "away")
    assert "resumed after step 1" in _train(workshop, run, caplog, "--run.steps=3")
    assert [row["step"] for row in workshop.metrics(str(run))] == [1, 2, 3]


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
