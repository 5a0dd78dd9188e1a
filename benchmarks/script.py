"""The command line of a script in this directory, and the CPUs that it computes on.

Its import sets the environment that PyTorch reads when it is loaded, so scripts import it first.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from longtail.cli.main import guarded, set_environment
from longtail.config.arguments import WORD, Parser, read
from longtail.config.sections import Count

set_environment()

T = TypeVar("T")
Run = Annotated[str, WORD, Field(description="TOML file or recipe to measure")]
Overrides = Annotated[
    tuple[str, ...],
    Field(description="--section.key VALUE sets a field of RUN, as for longtail train"),
]
Json = Annotated[bool, Field(description="print the JSON line only")]
Threads = Annotated[int, Field(ge=1, le=1024, description="compute threads of each contestant")]
Repeats = Annotated[int, Field(ge=1, le=1000, description="measured turns of each contestant")]
Batches = Annotated[tuple[Count, ...], Field(description="numbers of requests running at a time")]


def start(kind: type[T], run: Callable[[T], int]) -> int:
    """Run a script with the options of the command line; return its exit code."""
    return guarded(lambda: run(parse(kind, sys.argv[1:])))


def parse(kind: type[T], words: Sequence[str]) -> T:
    """Return a script's options. Raises ConfigError, which names the option that is wrong.

    Example: parse(Options, ["gsm", "--batches", "1,8", "--model.path", "model"])
    """
    script = sys.modules[kind.__module__]
    parser = Parser("", script.__doc__ or "")
    parser.prog = f"python benchmarks/{Path(script.__file__ or '').name}"
    parser.declare(kind)
    return read(kind, parser, words)


def pin(threads: int) -> list[int]:
    """Keep this process and its children on the last `threads` CPUs it may use; return them.

    The list is empty where the system cannot pin. To choose other CPUs, use `taskset`.
    """
    if sys.platform != "linux":
        return []
    cpus = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cpus)
    return cpus


def pinned(cpus: Sequence[int]) -> str:
    """Return the words of a card for `pin`'s result."""
    return f"pinned to CPU {', '.join(map(str, cpus))}" if cpus else "not pinned"
