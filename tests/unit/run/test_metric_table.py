import ast
import re
from pathlib import Path

import longtail
from longtail.run.metric_table import TABLE, describe

SOURCES = Path(longtail.__file__).parent
NAMES = [metric.name for rows in TABLE.values() for metric in rows]
SECTIONS = sorted({name.partition("/")[0] for name in NAMES})


def _written() -> set[str]:
    """Names of metrics in the code, as whole strings; a star stands for what is filled in."""
    found = set()
    for path in SOURCES.rglob("*.py"):
        if path.name == "metric_table.py" or path.parent.name in ("bench", "view"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Constant(value=str(text)):
                    pass
                case ast.JoinedStr(values=parts):
                    text = "".join(p.value if isinstance(p, ast.Constant) else "*" for p in parts)
                case _:
                    continue
            if re.fullmatch(rf"({'|'.join(SECTIONS)})/[a-z0-9_*/]+", text):
                found.add(text)
    return found


def test_no_name_is_described_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_each_metric_that_the_code_names_has_a_description() -> None:
    written = _written()
    assert len(written) > 40
    # a part filled in at run time, such as cluster/*_s, is compared with a run's own names
    assert not [name for name in written if "*" not in name and describe(name) is None]


def test_an_exact_name_comes_before_one_with_a_star() -> None:
    mean, part = describe("reward/mean"), describe("reward/length")
    assert mean is not None
    assert part is not None
    assert (mean.name, part.name) == ("reward/mean", "reward/*")
    level = describe("task/chain_sum/level")
    assert level is not None
    assert level.unit == "level"
    assert describe("unknown/metric") is None
    assert describe("reward/a/b") is None
