"""Check the language of docstrings, comments and messages; part of `make lint`.

    python tests/house/language.py [FILE ...]

Docstrings start with a noun phrase, or with a verb for functions. Objects are not persons. The
style is described in docs/architecture.md.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

OPENINGS = re.compile(
    r"(Of|What|Whatever|Who|Whoever|Whose|Which|How|Where|Nobody|Somebody|Anybody|Everybody|Tell|"
    r"Say|Hear|Listen|Look|Notice|Take note|Note that|So many|That|As|Have|Let)\b"
)
"""First words that a docstring must not have."""

WORDS = re.compile(
    r"\b(whoever|nobody|somebody|anybody|everybody|so many|so much|is told|are told|was told|tells|"
    r"hears|heard of|speaks of|says so)\b",
    re.IGNORECASE,
)
"""Words that docstrings, comments and messages must not hold."""


def problems(path: Path) -> Iterator[str]:
    """Yield one line `file:line: problem` for each offence of a Python file."""
    text = path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, docstring in docstrings(ast.parse(text)):
        if found := OPENINGS.match(docstring.strip()):
            yield f"{name}:{line}: docstring opens with {found[0]!r}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kinds = (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1))
        if token.type in kinds and (found := WORDS.search(token.string)):
            line = token.start[0] + token.string[: found.start()].count("\n")
            yield f"{name}:{line}: {found[0]!r}"


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string that stands alone as a statement."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def main(words: list[str]) -> int:
    """Print all problems of the named files, or of the package; return 1 if there are any."""
    paths = [Path(word).resolve() for word in words]
    paths = paths or sorted((ROOT / "src" / "longtail").rglob("*.py"))
    this = Path(__file__).resolve()  # it holds the words as data
    found = [line for path in paths if path != this for line in problems(path)]
    print("\n".join(found) if found else "language: no problem")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
