"""What a process computes on: device, dtypes, threads."""

import contextlib
import sys
from collections.abc import Iterator

import torch

from longtail.errors import ConfigError
from longtail.system import machine

_WORTH_SHARING = 512
"""Hidden size from which several threads decode faster than one."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def threads_each(threads: int, workers: int) -> int:
    """Return the compute threads of each of so many workers (0: they share the cores)."""
    return threads or max(machine.usable_cores() // workers, 1)


def set_threads(threads: int) -> int:
    """Give this process so many compute threads (0: every core) and return the number.

    Raises ConfigError for a number that no system could begin.
    """
    if not 0 <= threads <= machine.MAX_THREADS:
        raise ConfigError(
            f"threads = {threads}: it must be from 0 (every core) to {machine.MAX_THREADS}"
        )
    count = threads or machine.usable_cores()
    torch.set_num_threads(count)
    return count


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Compute on so many threads while inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rollout_threads(hidden_size: int) -> int:
    """Decode a small model on one thread: its products are too short to share.

    Two threads that wait for each other some thousand times a second gain nothing on a quiet
    machine and lose tenfold on a busy one.
    """
    return 1 if hidden_size < _WORTH_SHARING else torch.get_num_threads()


def to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def choose_device(name: str) -> torch.device:
    """Return the device that `run.device` names; raises ConfigError where there is none such."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}: PyTorch sees no GPU here; use auto or cpu")
    device = torch.device(chosen)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device = {name!r}: PyTorch sees {torch.cuda.device_count()} GPUs here, and they "
            "count from 0"
        )
    return device
