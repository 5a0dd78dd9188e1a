"""Limits of length, calls that are refused, and pages that agree with the program."""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import pages
from longtail.cli.commands import COMMANDS
from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from support.metric_names import NAMES, is_described

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "longtail"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONFIGS = (RunConfig, SftConfig, DrafterTrainConfig)
_CODE = r"```[a-z]*\n(.*?)```|`([^`\n]+)`"
MAX_FILE, MAX_TEST_FILE, MAX_FUNCTION = 400, 500, 60


def test_no_file_is_longer_than_its_limit() -> None:
    limits = {path: MAX_FILE for path in (*SOURCES, *PACKAGE.rglob("*.c"))}
    limits |= {path: MAX_TEST_FILE for path in (ROOT / "tests").rglob("*.py")}
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in limits}
    assert not {str(path): n for path, n in lengths.items() if n > limits[path]}


def test_no_function_is_too_long_and_no_call_trusts_remote_code_or_pickles() -> None:
    found = []
    nodes = [(path, node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))]
    for path, node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION:
                    found.append(f"{path}: {node.name} is too long")
            case ast.keyword(arg="trust_remote_code" | "allow_pickle"):
                if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                    found.append(f"{path}:{node.lineno} {node.arg}")
    assert not found


_READERS = {
    *("system/files.py", "config/files.py", "config/arguments.py", "programs/drafter_eval.py"),
    *("view/run_files.py", "run/metrics_log.py", "bench/arms.py"),
}
"""Files that may parse JSON or TOML: the one reader that checks it, TOML, and logs of runs."""


def test_json_is_read_by_the_one_reader_that_checks_it() -> None:
    reads = re.compile(r"\b(json|tomllib)\.loads?\b|raw_decode|from (json|tomllib) import .*load")
    texts = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in SOURCES}
    assert {name for name, text in texts.items() if reads.search(text)} <= _READERS


@pytest.mark.parametrize("name", sorted(pages.PAGES))
def test_a_generated_page_is_what_the_program_has(name: str) -> None:
    # `make docs` writes it anew
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == pages.PAGES[name]()


@pytest.mark.parametrize("model", CONFIGS)
def test_every_field_has_a_docstring_and_a_default(model: type[BaseModel]) -> None:
    for name, info in files.fields_of(model).items():
        assert info.description, name
        assert not info.is_required(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_only_commands_options_targets_and_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verbs = {name.split()[0] for name in COMMANDS}
    code = [block + "\n" + span for block, span in re.findall(_CODE, text, re.DOTALL)]
    named = re.findall(r"^(?:\$ )?longtail ([a-z]+)\b", "\n".join(code), re.MULTILINE)
    assert set(named) <= verbs
    known = {name for model in CONFIGS for name in files.fields_of(model)}
    options = set(re.findall(r"--([a-z_]+\.[a-z_]+)", text))
    assert options <= known | {"section.key", "a.b"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)\b`", text)) <= targets
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        assert "://" in target or (page.parent / target).exists(), target


def test_each_fault_has_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    table = page.partition("## What happens when")[2].split("|---|\n")[1].partition("\n\n")[0]
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for row in table.splitlines():
        assert re.fullmatch(r"\|( [^|]+ \|){3} `test_\w+` \|", row), row
        assert f"def {row.split('`')[-2]}(" in code, row


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)
    elif isinstance(value, int | float):
        yield value


def test_each_ratio_in_a_row_of_the_readme_is_in_the_card_that_it_links() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\|.*\((benchmarks/\w+)\.(?:json|txt)\).*)", readme, re.MULTILINE)
    assert rows
    for line, card in rows:
        known = {f"{n:.2f}" for n in _numbers(json.loads((ROOT / f"{card}.json").read_text()))}
        _, _, stated = line.partition("|")[2].partition("|")
        ratios = re.findall(r"\d+\.\d\d", stated.partition("|")[0])
        assert ratios
        assert set(ratios) <= known, line


def test_each_metric_that_the_code_names_is_described_once() -> None:
    sections = "|".join({name.partition("/")[0] for name in NAMES})
    written = {
        node.value
        for path in SOURCES
        if path.parent.name not in ("bench", "view")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(rf"({sections})/[a-z0-9_/]+", node.value)
    }
    assert len(written) > 40
    # a part filled in at run time, such as cluster/*_s, is compared with a run's own names
    whole = {f"{name}1" if name.endswith("_") else name for name in written}
    assert not [name for name in whole if not is_described(name)]
    assert len(NAMES) == len(set(NAMES))
