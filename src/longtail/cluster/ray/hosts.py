"""Checks of the hosts of a run, and files that only the driver has.

driver   Kit(software, directory, SHA-256 of its files) --> every host
host     same software, or an error that names it and the difference
         same files under the same path, else in the cache, else asks the driver for them
"""

import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray

from longtail.errors import ClusterError
from longtail.model.kernels import native
from longtail.system.cache import build_once, cache_directory
from longtail.system.files import fingerprint
from longtail.system.machine import vllm_version

_SENT = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Kinds of files of a model that are compared and sent; none is code or a pickle."""
_CACHED, _KERNELS, _VLLM = "models", "native kernels", "vLLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """The software and the model of the driver's host.

    Example: Kit(software={"PyTorch": "2.13.0"}, directory=Path("model"), digests={"config.json":
    "9f..."})
    """

    software: Mapping[str, str]
    directory: Path
    digests: Mapping[str, str]
    """SHA-256 of the model's files by name."""

    @property
    def name(self) -> str:
        """Name of the model's files in the cache of a host."""
        return hashlib.sha256(repr(sorted(self.digests.items())).encode()).hexdigest()[:16]


def own_kit(directory: Path, *, on_cpu: bool, on_vllm: bool = False) -> Kit:
    """Return the kit of this host; on a GPU the processor's kernels may differ."""
    software = _software(on_cpu=on_cpu, on_vllm=on_vllm)
    return Kit(software=software, directory=directory, digests=_digests(directory))


def find(kit: Kit) -> Path | None:
    """Check this host, and return the model's directory here; None if it has to be sent.

    Raises ClusterError if software or files differ from the driver's.
    """
    own = _software(on_cpu=_KERNELS in kit.software, on_vllm=_VLLM in kit.software)
    _compare(own, kit.software, "install the same on every host, or set LONGTAIL_ISA=avx2 on each")
    if kit.directory.exists():
        remedy = f"copy {kit.directory} to every host, or remove it there, so that it is sent"
        _compare(_digests(kit.directory), kit.digests, remedy)
        return kit.directory
    cached = cache_directory() / _CACHED / kit.name
    return cached if cached.exists() and _digests(cached) == kit.digests else None


def read(kit: Kit) -> dict[str, NDArray[np.uint8]]:
    """Read the model's files."""
    return {name: np.fromfile(kit.directory / name, np.uint8) for name in kit.digests}


def keep(kit: Kit, files: Mapping[str, Any]) -> Path:
    """Write files that the driver has stored in Ray into the cache; return their directory.

    Raises ClusterError if what has come is something else, ConfigError if the disk is full.
    """

    def write(folder: Path) -> None:
        folder.mkdir()
        for name in kit.digests:
            ray.get(files[name]).tofile(folder / name)
        _compare(_digests(folder), kit.digests, "start again")

    return build_once(_CACHED, kit.name, write)


def _software(*, on_cpu: bool, on_vllm: bool) -> dict[str, str]:
    """Return what has to be equal for equal texts; on a GPU the processors may differ."""
    found = {
        "longtail": metadata.version("longtail"),
        "PyTorch": torch.__version__,
        "Python": platform.python_version(),
    }
    if on_cpu:
        found["instructions"] = torch.backends.cpu.get_cpu_capability()
        found[_KERNELS] = native.build_name()
    if on_vllm:
        found[_VLLM] = vllm_version()
    return found


def _digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of a model's files."""
    files = sorted(each for each in directory.iterdir() if each.suffix in _SENT)
    return {each.name: fingerprint(each)["sha256"] for each in files}


def _compare(own: Mapping[str, str], wanted: Mapping[str, str], remedy: str) -> None:
    """Raise ClusterError with this host's name and the first difference."""
    for name in sorted({*own, *wanted}):
        here, there = own.get(name, "missing"), wanted.get(name, "missing")
        if here != there:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            raise ClusterError(
                f"host {host}: {name} is {here[:40]}, and {there[:40]} on the driver's host; "
                f"{remedy}"
            )
