"""Documents and program agree."""

import re
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from house.tree import ROOT, SOURCES, module_name
from longtail.cli import docs as cli_docs
from longtail.cli.commands import COMMANDS
from longtail.config import files as configfile
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig

README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("name", sorted(cli_docs.PAGES))
def test_a_generated_page_is_what_the_program_has(name: str) -> None:
    # `make docs` writes it anew
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == cli_docs.PAGES[name]()


@pytest.mark.parametrize("model", [RunConfig, SftConfig, DrafterTrainConfig])
def test_every_field_is_explained_and_every_unset_one_may_be_left_out(
    model: type[BaseModel],
) -> None:
    for name, info in configfile.fields_of(model).items():
        assert info.description, f"{name} has no docstring"
        assert not info.is_required(), f"{name} has no default"
        optional = type(None) in typing.get_args(info.annotation)
        assert not optional or info.default is None, f"{name}: unset must be the default"
        assert typing.get_origin(info.annotation) is not types.MappingProxyType


def _commands(page: Path) -> list[list[str]]:
    """Words of each `longtail ...` line of a page's code."""
    text = page.read_text(encoding="utf-8")
    code = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.DOTALL) + re.findall(
        r"`([^`\n]+)`", text
    )
    lines = [line.strip().removeprefix("$ ") for block in code for line in block.splitlines()]
    return [line.split() for line in lines if re.match(r"longtail( |$)", line)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_names_only_commands_that_exist(page: Path) -> None:
    verbs = {name.split()[0] for name in COMMANDS}
    for words in _commands(page):
        if len(words) > 1 and re.fullmatch(r"[a-z]+", words[1]):
            assert words[1] in verbs, " ".join(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_names_only_make_targets_that_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)\b`", page.read_text(encoding="utf-8")))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_names_only_options_that_exist(page: Path) -> None:
    models = (RunConfig, SftConfig, DrafterTrainConfig)
    known = {name for model in models for name in configfile.fields_of(model)}
    sections = {name.partition(".")[0] for name in known}
    dotted = re.findall(r"--([a-z_]+\.[a-z_]+)", page.read_text(encoding="utf-8"))
    assert {name for name in dotted if name not in known and name != "section.key"} <= {"a.b"}
    named = re.findall(r"`([a-z_]+\.[a-z_]+)(?: = [^`]*)?`", page.read_text(encoding="utf-8"))
    suffixes = ("py", "md", "toml", "json", "jsonl", "c", "txt", "parquet", "safetensors", "jinja")
    fields = [
        n for n in named if n.partition(".")[0] in sections and n.partition(".")[2] not in suffixes
    ]
    modules = {"data.source", "model.generate", *map(module_name, SOURCES)}
    assert {name for name in fields if name not in known} <= modules


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_links_only_to_files_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_readme_leads_with_the_two_commands() -> None:
    if not README.exists():
        pytest.skip("no README yet")
    text = README.read_text(encoding="utf-8")
    assert "make quickstart" in text
    assert "make test" in text


def test_the_files_that_make_a_package_are_there() -> None:
    for name in ("LICENSE", "CHANGELOG.md", "Makefile", "src/longtail/py.typed", ".ci/run"):
        assert (ROOT / name).exists(), name
    assert "torch==2.13.0" in (ROOT / "constraints-dev.txt").read_text()
