"""Options of a benchmark as its command line gives them."""

from typing import Any

from longtail.bench.options import BENCHES
from longtail.config.options import arguments_of, read


def parse(name: str, *words: str) -> Any:
    """Return the options of one benchmark. Example: parse("engine", "--quick")"""
    options = BENCHES[name].options
    return read(options, arguments_of(f"bench {name}", "", options), words)
