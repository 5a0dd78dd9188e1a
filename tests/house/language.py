"""Check how docstrings begin; part of `make lint`.

    python tests/house/language.py [FILE ...]

They start with a noun phrase, or with a verb for functions (docs/architecture.md, Style).
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPENINGS = re.compile(
    r"(Of|What|Whatever|Who|Whoever|Whose|Which|How|Where|Nobody|Somebody|Anybody|Everybody|Tell|"
    r"Say|Hear|Listen|Look|Notice|Take note|Note that|So many|That|As|Have|Let)\b"
)
"""First words that a docstring must not have."""


def problems(path: Path) -> Iterator[str]:
    """Yield a line for each offence of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                if found := OPENINGS.match(text.strip()):
                    yield f"{path}:{node.lineno}: docstring opens with {found[0]!r}"


if __name__ == "__main__":
    paths = [Path(word) for word in sys.argv[1:]] or sorted((ROOT / "src/longtail").rglob("*.py"))
    if lines := [line for path in paths for line in problems(path)]:
        sys.exit("\n".join(lines))
    print("language: no problem")
