"""How large a file and a function may be, and which shortcuts nobody takes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from house.tree import PACKAGE, ROOT, SOURCES, module_name, parse

MAX_FILE = 400
MAX_TEST_FILE = 500
MAX_FUNCTION = 60

BROAD_EXCEPT = (
    *("model.hf.tokenizer", "rl.grading.grader", "rl.grading.reward", "rl.data.sources"),
    *("engine.engine", "serve.engine_thread"),
)
"""Where a foreign library or a user's function raises whatever it likes, and where what one
request raises must end that request alone."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, Function))


TESTS = sorted((ROOT / "tests").rglob("*.py"))
KERNELS = sorted(PACKAGE.rglob("*.c"))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS, *KERNELS], ids=_id)
def test_a_file_is_read_in_one_sitting(path: Path) -> None:
    limit = MAX_TEST_FILE if path in TESTS else MAX_FILE
    assert len(path.read_text(encoding="utf-8").splitlines()) <= limit


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_a_function_fits_a_screen(path: Path) -> None:
    long = {
        f"{f.name}: {length} lines"
        for f in _functions(path)
        if (length := (f.end_lineno or f.lineno) - f.lineno + 1) > MAX_FUNCTION
    }
    assert not long


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_nothing_from_disk_is_executed(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile"), f"line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            loads = (node.value.id, node.attr)
            assert loads not in (("torch", "load"), ("torch", "save"), ("numpy", "load"))
        if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle"):
            assert isinstance(node.value, ast.Constant), f"line {node.value.lineno}"
            assert node.value.value is False, f"line {node.value.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_attributes_are_written_not_looked_up_by_string(path: Path) -> None:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("hasattr", "setattr", "delattr"), f"line {node.lineno}"
            if node.func.id == "getattr":
                named = isinstance(node.args[1], ast.Constant)
                assert not named, f"line {node.lineno}: write the attribute"


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_failures_are_not_swallowed(path: Path) -> None:
    if module_name(path) in BROAD_EXCEPT:
        return
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        reraises = bool(node.body) and isinstance(node.body[-1], ast.Raise)
        assert caught not in ("everything", "Exception", "BaseException") or reraises, (
            f"line {node.lineno}: except {caught}"
        )


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=_id)
def test_annotations_are_not_deferred(path: Path) -> None:
    future = [n for n in parse(path).body if isinstance(n, ast.ImportFrom)]
    assert all(node.module != "__future__" for node in future)


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_no_global_random_state_is_read(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = re.findall(
        r"\b(?:torch\.manual_seed|np\.random\.seed|random\.seed|random\.random)\b", text
    )
    assert not found


@pytest.mark.parametrize("path", [*SOURCES, *KERNELS], ids=_id)
def test_source_text_is_ascii(path: Path) -> None:
    assert path.read_text(encoding="utf-8").isascii()


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_every_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(parse(path))


@pytest.mark.parametrize("path", TESTS, ids=_id)
def test_tests_are_plain_functions_with_sentences_for_names(path: Path) -> None:
    tree = parse(path)
    assert not [n.name for n in tree.body if isinstance(n, ast.ClassDef) and "Test" in n.name]
    short = {
        f.name for f in _functions(path) if f.name.startswith("test_") and f.name.count("_") < 3
    }
    assert not short
