"""Command lines in processes of their own, which tests may kill.

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
"""Seconds that a test waits for a process before it fails."""


def start(words: Sequence[str], log: Path, prepare: Callable[[], object] = bool) -> BaseProcess:
    """Start `longtail WORDS`; its output goes to `log`. The process calls `prepare` first."""
    process = _CONTEXT.Process(target=_run, args=(list(words), str(log), prepare))
    process.start()
    return process


def finish(process: BaseProcess) -> int:
    """Wait for the end and return the exit code, negative for a signal."""
    process.join(PATIENCE_S)
    assert process.exitcode is not None, f"the process has not ended within {PATIENCE_S} s"
    return process.exitcode


def wait_until(
    condition: Callable[[], bool], process: BaseProcess, *, poll_s: float = 0.005
) -> bool:
    """Wait until the condition holds; return False if the process ended before it held.

    Starting processes share two cores with the caller, so each poll delays what is waited for.
    """
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if not process.is_alive():
            return condition()
        assert time.monotonic() < deadline, f"the condition did not hold within {PATIENCE_S} s"
        time.sleep(poll_s)
    return True


def _run(words: list[str], log: str, prepare: Callable[[], object]) -> None:
    from longtail.cli import main as cli

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    prepare()
    sys.exit(cli.main(words))
