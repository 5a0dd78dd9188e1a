"""Loads the C kernels: those of the wheel, or compiled once per machine if there is a C compiler.

A compiled library is an entry of the user's cache (`longtail.system.cache`), named by the digest of
source, flags, compiler and processor; a damaged library, or another user's, is never loaded.
Without a compiler PyTorch's slower operations run; `unavailable_because` gives the reason.
"""

import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from longtail.model.kernels import build
from longtail.system import machine
from longtail.system.cache import build_once

_log = logging.getLogger(__name__)

_LIBRARY = "kernels.so"
_ANNOUNCED = "compiling native kernels, once, for about 10 s"
Layout = Literal["inputs", "halves", "pairs", "tiles"]


class _PTR:
    """Address of a tensor, a packed weight, an array or a structure; None is NULL."""

    @staticmethod
    def from_param(value: Any) -> Any:
        """Convert an argument of a kernel."""
        return ctypes.c_void_p.from_param(_address(value))


def _address(value: Any) -> Any:
    return value.data_ptr() if hasattr(value, "data_ptr") else value


_INT, _FLOAT, _THREADS = ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, list[Any]] = {
    "product": [_PTR] * 4 + [_INT] * 3 + [_THREADS],
    "draw_rows": [_PTR] + [_INT] * 3 + [_PTR] * 3 + [_INT] + [_PTR] * 2 + [_THREADS],
    "add_norm": [_PTR] * 4 + [_INT] * 2 + [_FLOAT],
    "rotate": [_PTR] * 5 + [_INT] * 4 + [_FLOAT],
    "swiglu": [_PTR] * 2 + [_INT] * 2 + [_THREADS],
    "store_kv": [_PTR] * 2 + [_INT] + [_PTR] * 2 + [_INT] + [_PTR] * 2 + [_INT] * 2,
    "add_norm_forward": [_PTR] * 5 + [_INT] * 2 + [_FLOAT],
    "add_norm_backward": [_PTR] * 6 + [_INT] * 2 + [_FLOAT],
    "stream_norm": [_PTR] * 5 + [_INT] * 2 + [_FLOAT],
    "stream_norm_backward": [_PTR] * 7 + [_INT] * 2 + [_FLOAT],
    "add_fixed": [_PTR] * 2 + [_INT, _PTR, _THREADS],
    "from_fixed": [_PTR] * 2 + [_INT, ctypes.c_double, _THREADS],
    "rotate_backward": [_PTR, _INT] + [_PTR] * 4 + [_INT] + [_PTR] * 2 + [_INT] * 3 + [_FLOAT],
    "swiglu_backward": [_PTR] * 3 + [_INT] * 2 + [_THREADS],
    "attend_packed": [_PTR] * 3 + [_INT, _PTR, _INT] + [_PTR] * 3 + [_INT] * 5 + [_THREADS],
    "attend_packed_backward": [_PTR] * 3
    + [_INT, _PTR, _INT]
    + [_PTR] * 5
    + [_INT, _PTR]
    + [_INT] * 5
    + [_THREADS],
    "measure_rows": [_PTR] + [_INT] * 3 + [_PTR, _FLOAT] + [_PTR] * 3 + [_THREADS],
    "grade_rows": [_PTR] + [_INT] * 3 + [_PTR, _FLOAT] + [_PTR] * 2 + [_THREADS],
    "attend_rows": [_PTR, _INT, _PTR, _PTR, _INT] + [_PTR] * 5 + [_INT] * 5 + [_THREADS],
    "decode": [_PTR] * 2,
    "eagle_chains": [_PTR] * 3,
    "ridge_chains": [_PTR] * 5,
}


_NO_COMPILER = "no C compiler: install one (Debian: apt-get install gcc libc6-dev)"


def unavailable_because() -> str | None:
    """Return the reason why native kernels are unavailable; None if they are available."""
    if os.environ.get("LONGTAIL_NATIVE") == "0":
        return "LONGTAIL_NATIVE=0 is set"
    if platform.system() != "Linux":
        return f"they are built on Linux only, this is {platform.system()}"
    if shutil.which("cc") is None and build.shipped(machine.cpu_flags()) is None:
        return _NO_COMPILER
    return None


_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


@functools.cache
def _loaded() -> ctypes.CDLL | None:
    """Return the loaded kernels; None if there are none or, with a warning, cannot be built."""
    why = unavailable_because()
    if why == _NO_COMPILER:
        _log.warning("PyTorch's slower operations are used, there is %s", why)
    path = None if why else build.shipped(machine.cpu_flags()) or _build()
    return None if path is None else ctypes.CDLL(str(path))


@functools.cache
def layout(dtype: torch.dtype) -> Layout | None:
    """Return the weight layout of product.c for a dtype; None if it does not run here."""
    loaded = _loaded()
    if loaded is None or dtype not in _SUFFIXES:
        return None
    if dtype == torch.float32:
        return "inputs"
    found: dict[int, Layout] = {0: "halves", 1: "pairs", 2: "tiles"}
    return found.get(loaded["product_bf16_layout"]())


def structure(kind: type[ctypes.Structure], **values: Any) -> Any:
    """Return a C structure; tensors, packed weights and arrays are given by their addresses."""

    def field(value: Any) -> Any:
        return ctypes.addressof(value) if isinstance(value, ctypes.Array) else _address(value)

    return kind(**{name: field(value) for name, value in values.items()})


def build_name() -> str:
    """Return the name of the loaded build: equal where its source, compiler and flags are."""
    loaded = _loaded()
    if loaded is None:
        return "none"
    path = Path(loaded._name)
    return path.parent.name if path.name == _LIBRARY else path.stem


def lanes() -> int:
    """Return the number of float32 in a register of the loaded kernels."""
    loaded = _loaded()
    assert loaded is not None, "check `layout` first"
    return loaded["product_lanes"]()


@functools.cache
def functions(dtype: torch.dtype) -> Mapping[str, Callable[..., None]] | None:
    """Return the kernels of a dtype by name; None if there are none or they cannot be built."""
    loaded = _loaded()
    if dtype not in _SUFFIXES or loaded is None:
        return None
    found: dict[str, Callable[..., None]] = {}
    for name, signature in _SIGNATURES.items():
        function = loaded[f"{name}_{_SUFFIXES[dtype]}"]
        function.argtypes, function.restype = signature, None
        found[name] = function
    return found


def _build() -> Path | None:
    """Return the cached library, compiled if needed; None if the compiler fails."""
    compiler = shutil.which("cc")
    assert compiler is not None
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    cpuinfo = "" if machine.cpu_cap() else Path("/proc/cpuinfo").read_text()
    features = next((x for x in cpuinfo.splitlines() if x.startswith("flags")), "")
    flags = build.flags_of(machine.cpu_cap())
    name = build.digest(flags, version.stdout, features)

    def fill(folder: Path) -> None:
        build.compile_library(compiler, flags, folder / _LIBRARY)

    try:
        return build_once("kernels", name, fill, announce=_ANNOUNCED) / _LIBRARY
    except subprocess.CalledProcessError as error:
        _log.warning(
            "%s cannot compile the native kernels; PyTorch's slower operations are used: %s",
            compiler,
            error.stderr.strip()[:500],
        )
        return None
