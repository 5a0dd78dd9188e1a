import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import longtail
from longtail.cli import generate
from longtail.cli import main as cli
from longtail.cli.commands import COMMANDS
from longtail.config.rl import RunConfig
from longtail.engine.text import Piece
from support.tiny_models import tiny_model


def test_help_of_every_command_and_refusals_import_no_torch():
    script = (
        "import contextlib, io, sys\n"
        "from longtail.cli import main as cli\n"
        "from longtail.cli.commands import COMMANDS\n"
        "helps = [[*name.split(), '--help'] for name in COMMANDS]\n"
        "for words in [['--help'], ['trian'], *helps]:\n"
        "    out, err = io.StringIO(), io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):\n"
        "        with contextlib.suppress(SystemExit):\n"
        "            cli.main(words)\n"
        "    heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
        "    assert (out if '--help' in words else err).getvalue(), words\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_installed_command_is_this_one():
    command = [str(Path(sys.executable).parent / "longtail"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == cli.SUMMARY + "\n"


def test_version_and_summary_of_the_verbs(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"longtail {longtail.__version__}\n"
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert "verbs:" in said
    assert all(f"\n  {name.split()[0]} " in said for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "trian: no such verb (did you mean train?); the verbs are"),
        (
            ["qqq"],
            "qqq: no such verb; the verbs are train, sft, drafter, merge, generate, serve, bench, ",
        ),
        (["train", "no.toml"], "no.toml: no such file"),
        (["train", "--learner.los", "dapo"], "--learner.los (did you mean --learner.loss?)"),
        (
            ["train", "--learner.loss", "ppo", "quickstart"],
            "learner.loss = 'ppo': it must be grpo, dr_grpo",
        ),
        (["train", "--run.steps=0", "--rollout.top_p=2"], "2 problems"),
        (["train", "--dry-run", "--reward.name=no_such:f"], "reward.name = 'no_such:f': no mod"),
        (["generate", "nowhere", "--prompt", "x"], "'nowhere': no such directory"),
        (
            ["generate", "nowhere", "--n", "100000000"],
            "--n = 100000000: it must be less than or equal to 4096",
        ),
    ],
)
def test_a_mistake_is_one_message_on_stderr_and_exit_code_2(capsys, words, message):
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("longtail: ")
    assert message in err
    assert "Traceback" not in err


def test_a_dry_run_prints_configuration_and_memory_as_toml_needs_no_weights_and_writes_nothing(
    capsys, model_path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("bare").mkdir()
    Path("bare/config.json").write_bytes((model_path / "config.json").read_bytes())
    words = ["quickstart", "--dry-run", "--model.path=bare", "--learner.loss", "dapo"]
    words.append("--learner.kl_coef=0.1")
    assert cli.main(["train", *words]) == 0
    out = capsys.readouterr().out
    tables = tomllib.loads(out)
    assert tables["learner"]["loss"] == "dapo"
    assert tables["run"]["dir"] == "runs/quickstart"
    assert tables.keys() == RunConfig.model_fields.keys()
    parameters = sum(p.numel() for p in tiny_model().parameters())
    assert f"# memory, {parameters:,} parameters" in out
    for row in ("KV cache", "optimizer moments", "activations", "learner weights", "total"):
        assert row in out
    assert "available" in out
    assert cli.main(["train", *words, "--speculation.drafter=nowhere:Class"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_a_dry_run_of_fine_tuning_prints_its_configuration_to_any_reader():
    command = f"{sys.executable} -m longtail.cli.main sft --dry-run --train.steps=3"
    for reader, unbuffered, steps in (("cat", "", 3), ("true", "1", None)):
        done = subprocess.run(
            ["sh", "-c", f"{command} | {reader}"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
        assert done.stderr == ""
        assert tomllib.loads(done.stdout).get("train", {}).get("steps") == steps


def test_an_interrupt_ends_with_a_clean_line_and_no_text_is_refused(
    capsys, monkeypatch, model_path
):
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=interrupt))
    assert cli.main(["generate", str(model_path)]) == 130
    assert capsys.readouterr().err.endswith("--prompt gives one, too\nlongtail: interrupted\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda count: "a" * count))
    assert cli.main(["generate", str(model_path)]) == 2
    assert "standard input has no end after 10,000,000 characters" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert cli.main(["generate", str(model_path)]) == 2
    assert "standard input is not UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        ("--version >&-", 0, "", ""),
        ("trian 2>&-", 2, "", ""),
        ("--version >/dev/full", 1, "", "longtail: the output cannot be written (No space left"),
        ("trian 2>/dev/full", 1, "", ""),
    ],
)
def test_an_output_that_is_closed_or_full_ends_with_a_sentence_at_most(words, code, out, err):
    command = ["sh", "-c", f"exec {sys.executable} -m longtail.cli.main {words}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.startswith(err)
    assert done.stderr.count("\n") == bool(err)


def test_texts_are_written_as_utf8_whatever_the_locale_says(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["--version"]) == 0
    print("é", "\ud83d", flush=True)
    assert written.getvalue().endswith("é \\ud83d\n".encode())


@pytest.mark.slow
def test_equivalent_options_write_the_same_text(capsys, model_path):
    def text(*more: str) -> str:
        words = ["generate", str(model_path), "--max-tokens=12", "--threads=1", *more]
        assert cli.main(words) == 0
        return capsys.readouterr().out

    greedy = text("--prompt=hi", "--temperature=0")
    assert greedy == text("--prompt=hi", "--temperature=0", "--chat")
    raw = "--prompt=<user>hi<eos><assistant>"
    assert greedy == text(raw, "--temperature=0", "--raw")
    assert greedy != text("--prompt=hi", "--temperature=0", "--raw")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--prompt", ""], 2, "--prompt is empty"),
        (["--prompt", "x", "--max-tokens", "512"], 2, "of its 512 positions left"),
        (["--prompt", "x", "--temperature", "1e-300"], 1, "temperature = 1e-300: it must be 0"),
        (["--prompt", "x", "--top-p", "1e-400"], 1, "top_p = 0.0: it must be in (0, 1]"),
        (["--prompt", "x", "--stop", "\udcff"], 1, "no half of a surrogate pair"),
        (["--prompt", "x", "--max-tokens", "9" * 300], 2, "of its 512 positions left"),
    ],
)
def test_generate_refuses_what_cannot_be_served(capsys, model_path, words, code, message):
    assert cli.main(["generate", str(model_path), *words]) == code
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_generate_colours_what_drafts_foretold_and_changes_no_text(capsys, model_path):
    words = ["generate", str(model_path), "--prompt=1+1=", "--max-tokens=120", "--temperature=0"]
    words += ["--drafter=history", "--threads=1"]

    def text(*more: str) -> str:
        assert cli.main([*words, *more]) == 0
        return capsys.readouterr().out

    plain = text()
    coloured = text("--show-drafts")
    assert generate.coloured(Piece(text="42", drafted=True)) == "\x1b[32m42\x1b[0m"
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain


def test_drafts_are_shown_of_one_streamed_completion_only(capsys, model_path):
    for more in (["--n=2"], ["--json"]):
        words = ["generate", str(model_path), "--prompt=x", "--show-drafts", *more]
        assert cli.main(words) == 2
        assert "--show-drafts" in capsys.readouterr().err
