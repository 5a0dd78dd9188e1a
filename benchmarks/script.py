"""The command line of a script in this directory, and the CPUs that it computes on.

Its import sets the environment that PyTorch reads when it is loaded, so scripts import it first.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from longtail.cli.main import guarded, set_environment
from longtail.config.options import Option, arguments_of, read

set_environment()

T = TypeVar("T")
Run = Annotated[str, Option("TOML file or recipe to measure", "RUN", positional=True)]
Overrides = Annotated[
    tuple[str, ...], Option("--section.key VALUE sets a field of RUN, as for longtail train")
]
Threads = Annotated[int, Option("compute threads of each contestant", low=1, high=1024)]
Repeats = Annotated[int, Option("measured turns of each contestant", low=1, high=1000)]
Batches = Annotated[
    tuple[int, ...], Option("numbers of requests running at a time", low=1, high=1024)
]


def start(kind: type[T], run: Callable[[T], int]) -> int:
    """Run a script with the options of the command line; return its exit code."""
    return guarded(lambda: run(parse(kind, sys.argv[1:])))


def parse(kind: type[T], words: Sequence[str]) -> T:
    """Return a script's options. Raises ConfigError, which names the option that is wrong.

    Example: parse(Options, ["gsm", "--batches", "1,8", "--model.path", "model"])
    """
    script = sys.modules[kind.__module__]
    arguments = arguments_of("", script.__doc__ or "", kind)
    arguments.parser.prog = f"python benchmarks/{Path(script.__file__ or '').name}"
    return read(kind, arguments, words)


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
