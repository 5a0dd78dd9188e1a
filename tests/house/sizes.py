"""Print the lines of each package; refuse more lines or words than their budgets (`make lint`)."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC, TESTS = 38_400, 31_900
"""Most lines of Python in src/longtail and in tests: the count when it was set, and 3 %."""
DOCS, IDEA = 17_120, 310
"""Most words of all pages in docs/ that are written by hand, and of one in docs/ideas/."""
GENERATED = ("cli.md", "configuration.md", "metrics.md")


def count_lines(folder: Path) -> Counter[str]:
    """Return the lines of Python of each folder in `folder`; files beside them are `top level`."""
    found = Counter[str]()
    for path in folder.rglob("*.py"):
        first, *more = path.relative_to(folder).parts
        found[first if more else "top level"] += len(path.read_text("utf-8").splitlines())
    return found


def main() -> int:
    """Print all sizes; return 1 if one exceeds its budget."""
    packages, docs = count_lines(ROOT / "src" / "longtail"), ROOT / "docs"
    pages = [path for path in docs.rglob("*.md") if path.name not in GENERATED]
    words = {str(path.relative_to(docs)): len(path.read_text("utf-8").split()) for path in pages}
    sizes = [
        ("lines of src", packages.total(), SRC, "SRC"),
        ("lines of tests", count_lines(ROOT / "tests").total(), TESTS, "TESTS"),
        ("words of docs", sum(words.values()), DOCS, "DOCS"),
        *((page, words[page], IDEA, "IDEA") for page in words if page.startswith("ideas/")),
    ]
    for name, size in [*sorted(packages.items()), *(each[:2] for each in sizes[:3])]:
        print(f"{name:14}{size:8}")
    over = [each for each in sizes if each[1] > each[2]]
    for name, size, budget, constant in over:
        print(
            f"sizes: {name}: {size}, and the budget is {budget}: remove something, or raise "
            f"{constant} in tests/house/sizes.py and say in the commit what it buys"
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
