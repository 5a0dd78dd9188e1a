"""Limits of length and forms that ruff has no rule for; pyproject.toml holds the others."""

import ast
from collections.abc import Iterator
from pathlib import Path

from house.tree import PACKAGE, ROOT, SOURCES, parse

MAX_FILE = 400
MAX_TEST_FILE = 500
MAX_FUNCTION = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef
TESTS = sorted((ROOT / "tests").rglob("*.py"))
KERNELS = sorted(PACKAGE.rglob("*.c"))


def name(path: Path) -> str:
    """Return a path as messages show it."""
    return str(path.relative_to(ROOT))


def nodes(paths: list[Path]) -> Iterator[tuple[str, ast.AST]]:
    """Yield every node of the files with the place that a message shows."""
    for path in paths:
        for node in ast.walk(parse(path)):
            yield f"{name(path)}:{getattr(node, 'lineno', 1)}", node


def test_no_file_is_longer_than_its_limit() -> None:
    limits = [(path, MAX_FILE) for path in (*SOURCES, *KERNELS)]
    limits += [(path, MAX_TEST_FILE) for path in TESTS]
    lengths = {
        name(path): length
        for path, limit in limits
        if (length := len(path.read_text(encoding="utf-8").splitlines())) > limit
    }
    assert not lengths


def test_no_function_is_longer_than_its_limit() -> None:
    lengths = {
        f"{place} {node.name}": length
        for place, node in nodes(SOURCES)
        if isinstance(node, Function)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    }
    assert not lengths


def test_remote_code_and_pickled_arrays_are_refused_in_every_call() -> None:
    found = [
        place
        for place, node in nodes(SOURCES)
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle")
        if not (isinstance(node.value, ast.Constant) and node.value.value is False)
    ]
    assert not found


def test_no_code_is_compiled_from_text_and_no_attribute_is_named_by_a_string() -> None:
    forbidden = ("compile", "delattr", "hasattr", "setattr")
    ours = [path for path in SOURCES if "integrations" not in path.parts]  # hosts differ by release
    found = [
        place
        for place, node in nodes(ours)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in forbidden
        or (node.func.id == "getattr" and isinstance(node.args[1], ast.Constant))
    ]
    assert not found


def test_annotations_are_not_deferred() -> None:
    found = [
        place
        for place, node in nodes([*SOURCES, *TESTS])
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    assert not found


def test_source_text_is_ascii() -> None:
    paths = (*SOURCES, *KERNELS)
    assert not [name(path) for path in paths if not path.read_text(encoding="utf-8").isascii()]


def test_tests_are_functions_with_sentences_for_names() -> None:
    found = [
        f"{place} {node.name}"
        for place, node in nodes(TESTS)
        if (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        or (
            isinstance(node, Function)
            and node.name.startswith("test_")
            and node.name.count("_") < 3
        )
    ]
    assert not found
