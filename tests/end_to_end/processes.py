"""Command lines in processes of their own, which may be killed.

A fork server imports PyTorch once, so that a process costs a tenth of a second instead of seconds.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["longtail.loop", "transformers.tokenization_utils_tokenizers", "torch._dynamo"]
)
PATIENCE_S = 60.0
"""How long a process may take over anything, before a test gives up."""


def start(words: Sequence[str], log: Path, *, max_file_bytes: int | None = None) -> BaseProcess:
    """Begin `longtail WORDS`; what it says goes to `log`."""
    process = _CONTEXT.Process(target=_run, args=(list(words), str(log), max_file_bytes))
    process.start()
    return process


def finish(process: BaseProcess) -> int:
    """Wait for the end and return the exit code, negative for a signal."""
    process.join(PATIENCE_S)
    assert process.exitcode is not None, "the process goes on and on"
    return process.exitcode


def wait_until(condition: Callable[[], bool], process: BaseProcess) -> bool:
    """Look again and again until the condition holds; False if the process ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if not process.is_alive():
            return condition()
        assert time.monotonic() < deadline, "it never came to pass"
        time.sleep(0.0001)
    return True


def _run(words: list[str], log: str, max_file_bytes: int | None) -> None:
    import resource

    from longtail.cli import main as cli

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if max_file_bytes is not None:  # as a full disk would: writing beyond it is refused
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    sys.exit(cli.main(words))
