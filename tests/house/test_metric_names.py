"""docs/metrics.md has a line for every metric that the code names."""

import ast
import re
from pathlib import Path

import longtail
from support.metric_names import NAMES, is_described

SOURCES = Path(longtail.__file__).parent
SECTIONS = sorted({name.partition("/")[0] for name in NAMES})


def _written() -> set[str]:
    """Names of metrics in the code that are whole strings."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        if path.parent.name in ("bench", "view"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text for text in found if re.fullmatch(rf"({'|'.join(SECTIONS)})/[a-z0-9_/]+", text)}


def test_each_metric_that_the_code_names_is_described_once() -> None:
    written = _written()
    assert len(written) > 40
    # a part filled in at run time, such as cluster/*_s, is compared with a run's own names
    whole = {f"{name}1" if name.endswith("_") else name for name in written}
    assert not [name for name in whole if not is_described(name)]
    assert len(NAMES) == len(set(NAMES))
