"""Options of a benchmark as its command line gives them."""

import argparse
from typing import Any

from longtail.bench.common.options import read
from longtail.bench.registry import BENCHES


def parse(name: str, *words: str) -> Any:
    """Return the options of one benchmark. Example: parse("engine", "--batches=1,8")"""
    parser = argparse.ArgumentParser()
    BENCHES[name].add_arguments(parser)
    return read(BENCHES[name].options, parser.parse_args(words))
