"""Print lines and files of every package beside those of the last release; part of `make lint`.

    python tests/house/sizes.py

A package over its budget is an error: remove something, or raise the budget and say why.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASE = "0.2.0"

BUDGETS = {
    "top level": 1339,
    "assembly": 1600,
    "bench": 3368,
    "cli": 753,
    "cluster": 4966,
    "config": 1227,
    "drafter": 4977,
    "engine": 3186,
    "integrations": 1640,
    "model": 5095,
    "programs": 1185,
    "rl": 4397,
    "run": 1402,
    "serve": 915,
    "speculation": 1090,
    "system": 965,
    "tuner": 1190,
    "view": 1115,
    "vllm": 3398,
    "tests": 36668,
}
"""Most lines of each package: what it has now. Who needs more takes something away first."""
WORDS, WORDS_OF_IDEA = 17000, 300
"""Most words of all pages in docs/ that are written by hand, and of a page in docs/ideas/."""
GENERATED = ("cli.md", "configuration.md", "metrics.md")
THEN = {
    "top level": (1092, 6),
    "assembly": (1312, 9),
    "bench": (9327, 89),
    "cli": (1173, 8),
    "cluster": (3512, 24),
    "config": (1202, 8),
    "drafter": (4946, 28),
    "engine": (4125, 33),
    "integrations": (4097, 31),
    "model": (5746, 37),
    "programs": (1849, 10),
    "report": (702, 5),
    "rl": (5237, 32),
    "run": (1875, 11),
    "serve": (2774, 15),
    "speculation": (1037, 10),
    "system": (934, 12),
    "tiny": (421, 4),
    "tuner": (1167, 8),
    "view": (1216, 13),
    "tests": (44104, 267),
}
"""Lines and files of each package in the last release."""


def sizes() -> dict[str, tuple[int, int]]:
    """Return lines and files of every package, and of the tests."""
    found: dict[str, tuple[int, int]] = {}
    package = ROOT / "src" / "longtail"
    for path in (*package.rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        if path.is_relative_to(package):
            parts = path.relative_to(package).parts
            name = parts[0] if len(parts) > 1 else "top level"
        else:
            name = "tests"
        lines, files = found.get(name, (0, 0))
        found[name] = lines + len(path.read_text(encoding="utf-8").splitlines()), files + 1
    return found


def main() -> int:
    """Print the table; return 1 if a package exceeds its budget."""
    now = sizes()
    for table in (now, THEN):
        source = [each for name, each in table.items() if name != "tests"]
        table["src"] = sum(lines for lines, _ in source), sum(files for _, files in source)
    print(f"{'package':14}{'lines':>8}{'files':>7}{'budget':>8}{f'in {RELEASE}':>12}{'files':>7}")
    for name in sorted({*now, *THEN}, key=lambda each: (each in ("src", "tests"), each)):
        (lines, files), (lines_then, files_then) = now.get(name, (0, 0)), THEN.get(name, (0, 0))
        budget = BUDGETS.get(name, "-" if name == "src" else 0)
        print(f"{name:14}{lines:8}{files:7}{budget:>8}{lines_then:12}{files_then:7}")
    over = [
        name for name, (lines, _) in now.items() if lines > BUDGETS.get(name, 0) and name != "src"
    ]
    for name in over:
        print(f"sizes: {name} has {now[name][0]} lines, over its budget {BUDGETS.get(name, 0)}")
    words = {
        page: len(page.read_text(encoding="utf-8").split())
        for page in (ROOT / "docs").rglob("*.md")
        if page.name not in GENERATED
    }
    whole = sum(words.values())
    print(f"{'words of docs':14}{whole:8}{'':7}{WORDS:>8}")
    long = [
        page.name for page, n in words.items() if page.parent.name == "ideas" and n > WORDS_OF_IDEA
    ]
    for name in ["docs"] * (whole > WORDS) + long:
        print(f"sizes: {name} has more words than its budget")
    return 1 if over or long or whole > WORDS else 0


if __name__ == "__main__":
    sys.exit(main())
