"""The scripts of benchmarks/ run in their smallest form; pages name options that they have."""

import argparse
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gpu
import longtail
import script
import vllm_engine
from longtail.cli.commands import COMMANDS
from longtail.config import files
from longtail.config.arguments import read
from longtail.config.command_options import E2eBenchOptions
from longtail.config.rl import load
from support.toy import DRAFTERS, PROBLEMS, REASONER

BENCHMARKS = Path(script.__file__).parent


def run_script(name: str, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Run a script elsewhere, as a user does; return its exit code, its card and the result."""
    packages = Path(longtail.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *words],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    card, _, last = done.stdout.rstrip().rpartition("\n")
    return done.returncode, card, json.loads(last)


def options(name: str, *words: str) -> Any:
    """Return the options of a script. Example: options("engine", "gsm", "--texts=4")"""
    return script.parse(import_module(name).Options, words)


ROOT = BENCHMARKS.parent
TOY = (
    f"--model.path={REASONER}",
    f"--data.source={PROBLEMS}",
    "--data.heldout_size=0",
    "--rollout.group_size=4",
    "--rollout.max_tokens=16",
)


@pytest.mark.slow
def test_all_engines_do_the_same_work_and_drafts_change_no_text():
    words = ("--batches=2", "--texts=4", "--warm=8", "--repeats=1", "--rollout.dtype=float32")
    code, card, result = run_script("engine", *words, *TOY, "--speculation.drafter=history+fresh")
    assert code == 0
    assert card.startswith("With drafts, longtail generates ")
    (cell,) = result["cells"]
    rows = cell["rows"]
    assert list(rows) == ["plain", "history", "fresh", "tuned", "transformers"]
    assert [row["differing_share"] for row in rows.values()] == [0.0] * 4 + [None]
    assert rows["plain"]["over_plain"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert cell["num_texts"] == 4
    assert 4 <= cell["num_tokens"] <= 4 * 16
    assert result["environment"]["threads"] == 1


@pytest.mark.slow
def test_all_trainers_make_the_same_gradient():
    sizes = ("--mean-tokens=10", "--prompt-tokens=4", "--rollout.prompts_per_step=4")
    code, card, result = run_script(
        "learner", "--repeats=1", *sizes, *TOY, "--learner.tokens_per_micro_batch=64"
    )
    assert code == 0
    assert card.startswith("A step takes ")
    assert result["over_products"]["median"] > 1
    norms = result["grad_norm"]
    assert set(norms) == {"longtail", "modelled", "adapters", "transformers"}
    assert norms["longtail"] == pytest.approx(norms["transformers"], rel=0.1)
    assert norms["longtail"] == pytest.approx(norms["modelled"], rel=0.1)
    assert result["state_mb"]["adapters"] < result["state_mb"]["modelled"]


@pytest.mark.slow
def test_steps_of_two_sizes_stand_beside_their_limit():
    code, _, result = run_script("steps", f"--models={REASONER}", "--rows=1,3", "--repeats=1")
    assert code == 0
    assert [cell["rows"] for cell in result["cells"]] == [1, 3]
    assert all(cell["least_ms"]["median"] > 0 < cell["ms"]["median"] for cell in result["cells"])


@pytest.mark.slow
def test_turns_are_timed_with_the_kv_of_earlier_ones_and_without():
    code, _, result = run_script("turns", str(REASONER), "--repeats=1")
    assert code == 0
    assert [set(each) for each in result["turns"]] == [{"kept_s", "anew_s", "anew_over_kept"}] * 5


VLLM = f"""#!{sys.executable}
import json, sys
rule = json.loads(sys.argv[3])["rule"]
print(json.dumps({{"ready": "a vllm"}}), flush=True)
for line in sys.stdin:
    count = len(json.loads(line)["prompts"])
    last = 5 if rule in ("learned", "greedy") else 4
    print(json.dumps({{
        "tokens": [[1, 2, 3, last]] * count, "num_tokens": 4 * count, "num_drafts": 20,
        "num_accepted": 30 if rule == "coupled" else 10, "cpu_seconds": 1.0,
        "seconds": 2.0 if rule == "plain" else 1.0,
    }}), flush=True)
"""
"""A python that answers as `vllm_worker.py` does."""


@pytest.mark.slow
def test_rules_of_vllm_are_compared_and_a_text_that_must_not_differ_is_a_failure(tmp_path):
    python = tmp_path / "python"
    python.write_text(VLLM)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    words = (f"--python={python}", "--texts=3", "--repeats=2")
    drafter = f"--speculation.drafter={DRAFTERS['eagle1']}"
    code, card, result = run_script("vllm_engine", *words, *TOY, drafter)
    assert code == 1, "in float32 learned drafts change no text"
    assert vllm_engine.is_kept(1.0, options("vllm_engine", *words, "--dtype=bfloat16"))
    assert "coupled, by equality" in card
    figures = result["running"]["8"]
    assert figures["accept_length"] == {
        "learned": 1.5, "coupled": 2.5, "greedy": 1.5, "probabilistic": 1.5,
    }  # fmt: skip
    assert figures["differing_share"] == {
        "loop": 0.0, "learned": 1.0, "coupled": 0.0, "greedy": 1.0, "probabilistic": 0.0,
    }  # fmt: skip
    assert figures["throughput_ratio"]["coupled"]["median"] == 2.0


GIVEN = argparse.Namespace(
    model=Path("/m"), large=Path("/l"), reasoner=Path("/r"), out=Path("/o"), only=""
)


def _run_options(program: str, words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return RUN and the options of its configuration in a command, which is thereby checked."""
    if program != "-m":
        own = options(Path(program).stem, *words)
        return own.run, own.overrides
    _, *verb = words[: words.index("quickstart")]
    name, rest = " ".join(verb), words[1 + len(verb) :]
    if name == "train":
        return rest[0], rest[1:]
    own = read(E2eBenchOptions, COMMANDS[name].parser(name), rest)
    return own.run, own.overrides


def test_each_command_of_bench_gpu_is_known_and_changes_no_other_field_than_it_says():
    parts = gpu.parts(GIVEN)
    assert list(parts) == ["engines", "loop", "large", "pair", "learner", "exact", "reasoner"]
    assert sum(part.limit_s for part in parts.values()) < 960
    paths = set()
    for name, part in parts.items():
        for program, *words in part.commands:
            run, overrides = _run_options(program, words)
            config = load(files.locate(run), overrides)
            paths.add(config.model.path)
            assert config.rollout.vllm or name == "learner"
    assert paths == {"/m", "/l", "/r"}


LINES = [
    line
    for page in [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    for line in re.findall(
        r"python benchmarks/((?:engine|learner|vllm_engine)\.py [^`\n]*)",
        page.read_text(encoding="utf-8").replace("\\\n", ""),
    )
]


@pytest.mark.parametrize("line", LINES)
def test_each_command_of_a_page_is_known(line):
    name, *words = shlex.split(line.replace("PYTHON", sys.executable), comments=True)
    options(name.removesuffix(".py"), *words)
