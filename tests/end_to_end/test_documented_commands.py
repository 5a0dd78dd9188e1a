"""The commands and the Python of README and docs run as they are written, with a tiny model.

The names of models on the pages are directories of a tiny model here. Trainings
are shortened by further options. Benchmarks and servers are not started: their words are parsed.
"""

import ast
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

import longtail
from end_to_end.workshop import build, save_untaught, say, write_lines
from longtail.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if page.name not in ("CHANGELOG.md", "cli.md")
)

SHORT = {
    "train": (
        "--run.steps=1 --data.heldout_size=4 --rollout.prompts_per_step=2 --rollout.group_size=2 "
        "--rollout.max_tokens=8 --run.threads=1 --cluster.workers=1 "
        "--reward.name=end_to_end.rewards:sevens --data.source=prompts.jsonl"
    ),
    "drafter train": "--train.steps=1 --run.threads=1 --data.max_tokens=8",
    "drafter eval": "--n=2 --max-tokens=8",
    "generate": "--max-tokens=8 --threads=1",
}
"""Options that shorten a command, by its verb."""

MODELS = ("models/Qwen2.5-0.5B-Instruct", "Qwen/Qwen3-0.6B", "model.gguf", "smollm2")
PARSED_ONLY = ("serve", "bench", "view")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every file and run that the pages name."""
    shop = build(tmp_path_factory.mktemp("documented"))
    path = shop.path
    for name in (*MODELS, "MODEL"):  # a directory wins over any other meaning of its name
        shutil.copytree(shop.model, path / name)
    write_lines(path / "heldout.jsonl", {"prompt": "say 1"}, {"prompt": "say 2"})
    model = f'[model]\npath = "{path / "MODEL"}"\n'
    for name in ("run.toml", "RUN.toml"):
        (path / name).write_text(model)
    drafter = save_untaught(shop.model, path / "untaught")
    fixed = ("--speculation.tuner=fixed", "--speculation.depth=2", "--run.steps=1")
    said = shop.train("runs/first", f"--speculation.drafter={drafter}", *fixed)
    assert said.code == 0, said.err
    shutil.copytree(path / "runs/first", path / "runs/quickstart")
    said = say(
        *f"drafter export {drafter} --target {shop.model}".split(), f"--out={path / 'DOWNLOADED'}"
    )
    assert said.code == 0, said.err
    return path


def commands(page: Path) -> list[str]:
    """Lines of a page's console blocks that begin with `longtail`."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:console|sh|bash)\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("longtail ")]


@pytest.mark.slow
@pytest.mark.parametrize("page", list(filter(commands, PAGES)), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, place, monkeypatch):
    monkeypatch.chdir(place)
    for number, line in enumerate(commands(page)):
        words = shlex.split(line, comments=True)[1:]
        if (option := "--cluster.address") in words:  # no other machine is there
            at = words.index(option)
            del words[at : at + 2]
        verb = " ".join(words[:2]) if words[0] in ("drafter", "bench") else words[0]
        if words[0] in PARSED_ONLY:
            own = words[verb.count(" ") + 1 :]  # `--section.field` belongs to a configuration
            plain = [word for word in own if "." not in word.partition("=")[0] or word[0] != "-"]
            COMMANDS[verb].parser(verb).parse_args(plain)
            continue
        if verb.endswith("train") and "--run.dir" not in words:
            words.append(f"--run.dir=runs/{page.stem}-{number}")
        short = SHORT.get(verb, "").split()
        if "ridge" in words:  # one pass over the texts
            short[0] = "--data.size=40"
        said = say(*words, *short)
        assert said.code == 0, f"{line}: {said.err}"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_of_the_readme_asks_vllm_for_a_learned_drafter(tmp_path):
    engines: list[Mapping[str, object]] = []
    (block,) = python_blocks(ROOT / "README.md")
    run_block(block, tmp_path, {"LLM": lambda _, **settings: engines.append(settings)})
    (settings,) = engines
    assert settings["additional_config"] == {"longtail": {"drafter": "learned"}}


def run_block(block: str, folder: Path, names: Mapping[str, object]) -> None:
    script = folder / "block.py"
    script.write_text(block)
    runpy.run_path(str(script), init_globals=dict(names))


API = python_blocks(ROOT / "docs" / "api.md")


def test_the_page_of_the_api_names_every_public_name():
    named = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "api.md").read_text(encoding="utf-8")))
    assert set(longtail.__all__) <= named


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(API)))
def test_the_python_of_the_page_of_the_api_runs(number, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place)
    run_block(API[number], tmp_path, {})


CHANGES = (ROOT / "docs" / "change.md").read_text(encoding="utf-8").split("\n## ")[1:]


@pytest.mark.slow
@pytest.mark.parametrize("section", CHANGES, ids=[each.split("\n")[0] for each in CHANGES])
def test_each_change_takes_40_lines_and_trains(section, place, monkeypatch, tmp_path):
    """The change of a loss on two workers, which import the module, too."""
    blocks = re.findall(r"```(?:toml|python\n# (.*?))\n(.*?)```", section, flags=re.DOTALL)
    for name, text in blocks:
        (tmp_path / (name or "run.toml")).write_text(text)
    assert len(blocks) == 2
    assert len(section.strip().splitlines()) <= 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = [word for word in SHORT["train"].split() if "reward" not in word]
    words += [f"--model.path={place / 'MODEL'}", f"--data.source={place / 'prompts.jsonl'}"]
    words += ["--run.dir=run", f"--cluster.workers={1 + (blocks[0][0] == 'my_loss.py')}"]
    said = say("train", "run.toml", *words)
    assert said.code == 0, said.err


def test_the_python_for_vllm_imports_names_that_exist():
    ours = {
        (node.module, each.name)
        for block in python_blocks(ROOT / "docs" / "vllm.md")
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("longtail.")
        for each in node.names
    }
    assert ours
    assert all(callable(vars(import_module(str(module)))[name]) for module, name in ours)
