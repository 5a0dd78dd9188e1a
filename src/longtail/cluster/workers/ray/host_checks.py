"""Checks that all hosts have the same software and files; sends files that they lack.

driver   Kit(software, {directory: SHA-256 of its files}) --> every host
host     same software, or an error that names it and the difference
         same files under the same path, else in the cache, else asks the driver for them
"""

import hashlib
import platform
from collections.abc import Mapping, Sequence
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
from longtail.system.files import sha256
from longtail.system.machine import vllm_version

_SENT = (".json", ".safetensors", ".txt", ".model", ".jinja")
"""Kinds of files that are compared and sent; none is code or a pickle."""
_CACHED, _KERNELS, _VLLM = "models", "native kernels", "vLLM"
Digests = Mapping[str, str]
"""SHA-256 of the files of a directory by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """The software of the driver's host, and the directories of model and drafters."""

    software: Mapping[str, str]
    folders: Mapping[Path, Digests]


def own_kit(folders: Sequence[Path], *, on_cpu: bool, on_vllm: bool = False) -> Kit:
    """Return the kit of this host; on a GPU the processor's kernels may differ."""
    return Kit(
        software=_software(on_cpu=on_cpu, on_vllm=on_vllm),
        folders={each: _digests(each) for each in folders},
    )


def find(kit: Kit) -> dict[Path, Path]:
    """Check this host, and return where the driver's directories are here, if they are.

    Raises ClusterError if software or files differ from the driver's.
    """
    own = _software(on_cpu=_KERNELS in kit.software, on_vllm=_VLLM in kit.software)
    _compare(own, kit.software, "install the same on every host, or set LONGTAIL_ISA=avx2 on each")
    found: dict[Path, Path] = {}
    for folder, digests in kit.folders.items():
        cached = _cached(digests)
        if folder.exists():
            remedy = f"copy {folder} to every host, or remove it there, so that it is sent"
            _compare(_digests(folder), digests, remedy)
            found[folder] = folder
        elif cached.exists() and _digests(cached) == digests:
            found[folder] = cached
    return found


def read(folder: Path, digests: Digests) -> dict[str, NDArray[np.uint8]]:
    """Read the files of a directory."""
    return {name: np.fromfile(folder / name, np.uint8) for name in digests}


def keep(digests: Digests, files: Mapping[str, Any]) -> Path:
    """Write files that the driver has stored in Ray into the cache; return their directory.

    Raises ClusterError if what has come is something else, ConfigError if the disk is full.
    """

    def write(folder: Path) -> None:
        for name in digests:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            ray.get(files[name]).tofile(folder / name)
        _compare(_digests(folder), digests, "start again")

    return build_once(_CACHED, _cached(digests).name, write)


def _software(*, on_cpu: bool, on_vllm: bool) -> dict[str, str]:
    """Return what has to be equal for equal completions; on a GPU the processors may differ."""
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


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(each for each in folder.rglob("*") if each.suffix in _SENT)
    return {str(each.relative_to(folder)): sha256(each) for each in files}


def _cached(digests: Digests) -> Path:
    """Return the place of files in the cache."""
    name = hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]
    return cache_directory() / _CACHED / name


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
