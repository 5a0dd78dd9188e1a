"""A run directory that was damaged or edited: a sentence, and nothing is lost without one."""

import re
import shutil
from pathlib import Path

import pytest

from end_to_end.workshop import PLAIN, Said, Workshop, build, say, write_lines

WORDS = (
    *("--run.steps=2", "--run.checkpoint_every=1", "--rollout.max_tokens=8"),
    *("--data.heldout_size=0", PLAIN),
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


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_as_if_it_was_not_there(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newest = run / "checkpoints" / "step_000002"
    _flip(newest / "trainer.safetensors")
    said = _train(workshop, run, caplog)
    assert f"{newest} is damaged (" in said
    assert said.count("the checkpoint of step 1 is taken") == 1
    assert "resumed after step 1" in said
    assert workshop.outcome(str(run), 2) == workshop.outcome("whole", 2)


SMALL = (
    "--data.max_len=64",
    "--train.schedule=constant",
    "--run.checkpoint_every=1",
    "--run.threads=1",
    "--run.device=cpu",
)
TRAINING = {
    "sft": ("sft --model.path={model} --data.source={texts} --train.steps=2", "model.path"),
    "drafter train": (
        "drafter train --target.path={model} --data.source={texts} --data.completions=given "
        "--data.heldout_size=2 --drafter.recipe=eagle1 --drafter.window=8 --train.steps=2",
        "target.path",
    ),
}


def _go_on(workshop: Workshop, verb: str, run: Path, *more: str) -> Said:
    """Run a verb of training, or go on with its run."""
    texts = workshop.path / "texts.jsonl"
    write_lines(texts, *({"prompt": f"say {i}", "completion": f"it is {i}"} for i in range(12)))
    words = TRAINING[verb][0].format(model=workshop.model, texts=texts)
    return say(*words.split(), f"--run.dir={run}", *SMALL, *more)


@pytest.fixture(scope="module")
def trained(workshop: Workshop) -> dict[str, Path]:
    """A finished run of each verb of training."""
    found = {"train": workshop.path / "whole"}
    for verb in TRAINING:
        found[verb] = workshop.path / verb.replace(" ", "-")
        assert _go_on(workshop, verb, found[verb]).code == 0
    return found


@pytest.mark.slow
def test_a_damaged_drafter_is_dropped_with_one_line_and_the_texts_are_the_same(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--speculation.drafter=fresh",)
    assert workshop.train("drafted", *WORDS, *words).code == 0
    for text in ("[]", None):
        copy = run.parent / f"drafted {text}"
        shutil.copytree(workshop.path / "drafted", copy)
        for step in copy.glob("drafter/step_*"):
            if text is None:
                _flip(step / "tensors.safetensors")
            else:
                (step / "state.json").write_text(text)
        said = _train(workshop, copy, caplog, *words, "--run.steps=3")
        assert said.startswith("0: ")
        assert f"{copy / 'drafter' / 'step_000002'} is damaged" in said
    assert workshop.train("drafted", *WORDS, *words, "--run.steps=3").code == 0
    assert workshop.texts(str(copy)) == workshop.texts("drafted")


@pytest.mark.slow
def test_the_base_of_a_run_is_the_model_that_it_began_with(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("--learner.lora.rank=2", f"--model.path={run}")
    begun, merged = run.parent / "begun", [run.parent / name for name in ("first", "second")]
    assert workshop.train(str(begun), *WORDS, *words).code == 0
    assert say("merge", str(begun), "--out", str(merged[0])).code == 0
    # The base's run goes on; its checkpoint of then is still there.
    assert workshop.train(str(run), *WORDS, "--run.steps=3").code == 0
    said = _train(workshop, begun, caplog, *words, "--run.steps=3")
    assert said.startswith("0: ")
    shutil.rmtree(begun / "checkpoints" / "step_000003")
    assert say("merge", str(begun), "--out", str(merged[1])).code == 0
    assert _weights(merged[0]) == _weights(merged[1])
    # Now it is gone.
    assert workshop.train(str(run), *WORDS, "--run.steps=5").code == 0
    before = (begun / "config.toml").read_bytes()
    said = _train(workshop, begun, caplog, *words, "--run.steps=4")
    assert said.startswith("2: ")
    gone, now = (run / "checkpoints" / f"step_00000{step}" / "policy" for step in (2, 5))
    assert f"to the model that was in {gone} (SHA-256 " in said
    assert f"and {now} holds another one (" in said
    assert (begun / "config.toml").read_bytes() == before
    refused = say("merge", str(begun), "--out", str(run.parent / "third"))
    assert refused.code == 2
    assert f"and {now} holds another one" in refused.err
    assert not (run.parent / "third").exists()


def _weights(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("coef", "code"), [("0.1", "2: "), ("0", "0: ")])
def test_the_files_of_a_base_may_not_be_replaced(
    workshop: Workshop, tmp_path: Path, caplog: pytest.LogCaptureFixture, coef: str, code: str
) -> None:
    shutil.copytree(workshop.model, tmp_path / "model")
    words = (f"--model.path={tmp_path / 'model'}", f"--learner.kl_coef={coef}", "--run.steps=1")
    assert workshop.train(str(tmp_path / "run"), *WORDS, *words).code == 0
    _flip(tmp_path / "model" / "model.safetensors")
    said = _train(workshop, tmp_path / "run", caplog, *words, "--run.steps=2")
    assert said.startswith(code)
    assert ("learner.kl_coef refers to the model that was in" in said) == (coef != "0")
    assert ("put that model back" in said) == (coef != "0")


@pytest.mark.slow
def test_lines_of_another_kind_in_logs_are_left_out_and_counted(
    workshop: Workshop, run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = {
        "rollouts.jsonl": ['{"step": 2, "text": "edited"}', '{"step": 2, "text":'],
        "metrics.jsonl": ['{"step": 1, "reward/mean": "high"}', '{"step": 2, "timing_s/step": []}'],
        "trace.json": ['{"name": "spot", "args": {"step": 1}},', '{"ph": {"args": {"step": 1}},'],
    }
    for name, lines in odd.items():
        with (run / name).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)
    said = _train(workshop, run, caplog, "--run.steps=3")
    assert said.startswith("0: ")
    assert "metrics.jsonl: 2 lines are of another kind, and left out" in said
    assert "report.html: 3 lines of logs are of another kind, and left out" in said
    assert "no report" not in said
    assert (run / "report.html").stat().st_size > 10_000
    assert workshop.summary(str(run))["steps"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "field"),
    [("train", "model.path"), *((verb, field) for verb, (_, field) in TRAINING.items())],
)
def test_a_resume_that_fails_changes_no_file(
    workshop: Workshop, trained: dict[str, Path], tmp_path: Path, verb: str, field: str
) -> None:
    run = Path(shutil.copytree(trained[verb], tmp_path / "run"))
    config, name = (run / "config.toml").read_text(), field.partition(".")[2]
    config = re.sub(rf'\n{name} = ".*"', f'\n{name} = "nowhere"', config, count=1)
    (run / "config.toml").write_text(config)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    more = (f"--{field}=nowhere", f"--{'run' if verb == 'train' else 'train'}.steps=3")
    if verb == "train":
        said = workshop.train(str(run), *WORDS, *more)
    else:
        said = _go_on(workshop, verb, run, *more)
    assert said.code == 2
    assert "nowhere" in said.err
    assert "was begun with" not in said.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("verb", TRAINING)
def test_a_place_that_cannot_be_written_is_refused_in_one_sentence(
    tmp_path: Path, verb: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    said = say(*verb.split(), "--run.dir", str(tmp_path / "file/x"))
    assert said.code in (1, 2)
    assert f"run.dir = '{tmp_path / 'file/x'}': " in said.err
    assert said.err.count("\n") == 1
    assert "Traceback" not in said.err


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
