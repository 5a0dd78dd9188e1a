"""Device, dtypes and compute threads of a process."""

import contextlib
import sys
import time
from collections.abc import Iterator

import torch

from longtail.errors import ConfigError
from longtail.system import machine

_MULTITHREADED_SIZE = 512
"""Hidden size from which several threads decode faster than one."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def threads_each(threads: int, workers: int) -> int:
    """Return the number of compute threads of each worker (0: the workers share the cores)."""
    return threads or max(machine.usable_cores() // workers, 1)


def set_threads(threads: int) -> int:
    """Set the number of compute threads of this process (0: every core) and return it.

    Raises ConfigError if the number is out of range.
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
    """Compute on `count` threads inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rollout_threads(hidden_size: int) -> int:
    """Return the number of threads for decoding: 1 for a small model, whose products are short.

    Two threads that synchronise a thousand times a second gain nothing on an idle machine and are
    ten times slower on a busy one.
    """
    return torch.get_num_threads() if hidden_size >= _MULTITHREADED_SIZE else 1


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device has instructions for products of bfloat16, and PyTorch uses them.

    Elsewhere PyTorch emulates such products: learning takes about 12 times as long as in float32.
    """
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return (
        torch._C._has_mkldnn
        and machine.multiplies_bfloat16()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def to_stderr(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def choose_device(name: str) -> torch.device:
    """Return the device that `run.device` names. Raises ConfigError if it does not exist."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}: PyTorch finds no GPU here; use auto or cpu")
    device = torch.device(chosen)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device = {name!r}: PyTorch finds {torch.cuda.device_count()} GPUs here, "
            "numbered from 0"
        )
    return device


def own_engine_device(device: str, field: str) -> torch.device:
    """Return the CPU, where longtail's own engine generates; `auto` is the CPU, too.

    Raises ConfigError, which names the setting `field`, for a GPU.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"{field} = {device!r}: longtail's own engine generates on CPUs; on GPUs vLLM does "
            f"(docs/vllm.md): set rollout.engine = 'vllm' in longtail train, or {field} = 'cpu'"
        )
    return torch.device("cpu")


def now(device: torch.device) -> float:
    """Wait for a device, and return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
