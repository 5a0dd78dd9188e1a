"""Print lines, files and budget of every package, and words of docs; part of `make lint`.

Who is over a budget removes something, or raises it and says why.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS, WORDS_OF_IDEA = 17_000, 300
"""Most words of all pages in docs/ that are written by hand, and of a page in docs/ideas/."""
BUDGETS = {
    "top level": 1340,
    "assembly": 1597,
    "bench": 2251,
    "cli": 725,
    "cluster": 4330,
    "config": 1213,
    "drafter": 4411,
    "engine": 2697,
    "integrations": 1434,
    "model": 4825,
    "programs": 1211,
    "rl": 3937,
    "run": 1475,
    "serve": 912,
    "speculation": 991,
    "system": 919,
    "tuner": 1019,
    "view": 1063,
    "vllm": 3151,
    "src": 39_500,
    "tests": 32_000,
}
"""Most lines of each package, what it has now; of all together, and of tests."""
GENERATED = ("cli.md", "configuration.md", "metrics.md")


def sizes() -> dict[str, tuple[int, int]]:
    """Return lines and files of every package, of all of them (src), and of the tests."""
    found: dict[str, tuple[int, int]] = {}
    package = ROOT / "src" / "longtail"
    for path in (*package.rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        names = ["tests"]
        if path.is_relative_to(package):
            parts = path.relative_to(package).parts
            names = [parts[0] if len(parts) > 1 else "top level", "src"]
        for name in names:
            lines, files = found.get(name, (0, 0))
            found[name] = lines + len(path.read_text(encoding="utf-8").splitlines()), files + 1
    return found


def main() -> int:
    """Print the table; return 1 if something exceeds its budget."""
    now = sizes()
    print(f"{'package':14}{'lines':>8}{'files':>7}{'budget':>8}")
    for name in (*sorted(now.keys() - {"src", "tests"}), "src", "tests"):
        print(f"{name:14}{now[name][0]:8}{now[name][1]:7}{BUDGETS.get(name, 0):8}")
    over = [name for name, (lines, _) in now.items() if lines > BUDGETS.get(name, 0)]
    words = {
        page: len(page.read_text(encoding="utf-8").split())
        for page in (ROOT / "docs").rglob("*.md")
        if page.name not in GENERATED
    }
    print(f"{'words of docs':14}{sum(words.values()):8}{'':7}{WORDS:8}")
    over += ["docs"] * (sum(words.values()) > WORDS)
    ideas = {page.name: n for page, n in words.items() if page.parent.name == "ideas"}
    over += [name for name, n in ideas.items() if n > WORDS_OF_IDEA]
    for name in over:
        print(f"sizes: {name} is over its budget")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
