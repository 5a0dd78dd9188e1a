"""Names of metrics in docs/metrics.md; a star in a name stands for any text without a slash."""

import re
from pathlib import Path

_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAMES = re.findall(r"^\| `([a-z0-9_*/]+)` \|", _PAGE.read_text(encoding="utf-8"), flags=re.M)


def is_described(name: str) -> bool:
    """Return whether the page has a line for a metric."""
    return any(re.fullmatch(re.escape(each).replace(r"\*", "[^/]+"), name) for each in NAMES)
