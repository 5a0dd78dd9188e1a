"""Compilation of the C kernels: units, flags, and libraries that a wheel ships.

    units + flags --cc--> a library       by `native` at first use, for the processor at hand
                                          by setup.py for every level, LONGTAIL_WHEEL_KERNELS=1

Standard library only, since setup.py loads this file by its path. A shipped library has the digest
of its sources and flags in its name, so one of other sources is never found.
"""

import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_NAMES = (
    "common", "kernels", "attention", "vectors", "tiles", "packed", "product", "decoder", "draft",
    "noise", "select", "draws", "scores",
)  # fmt: skip
"""kernels.c includes packed.c and attention.c, which includes vectors.c and tiles.c; draws.c
includes select.c, which includes noise.c; all include common.c."""
_SOURCES = {name: Path(__file__).parent / "cpu" / f"{name}.c" for name in _NAMES}
_FLAGS = (
    "-O2",
    "-ftree-vectorize",
    "-fno-schedule-insns",  # on ARM, GCC would store all sums of a product in every step
    "-fopenmp",  # with the libgomp that PyTorch has loaded
    "-fPIC",
)
_X86 = ("-mprefer-vector-width=512", "-Wno-psabi")
_ARCHITECTURES: Mapping[str, tuple[str, ...]] = {
    "": ("-march=native",),
    "avx2": ("-march=x86-64-v3",),
    "avx512": ("-march=x86-64-v4",),
    "generic": ("-march=x86-64",),
    "bf16-emulated": ("-march=x86-64", "-Og", "-DLT_EMULATED=1"),
    "amx-emulated": ("-march=x86-64", "-Og", "-DLT_EMULATED=2"),
}
"""Flags by LONGTAIL_ISA."""
_FAST = ("-ffast-math", "-fno-finite-math-only")
_EXACT = ("-fno-math-errno", "-fno-trapping-math")
_LINK_FLAGS = ("-shared", "-fopenmp", "-lm")
"""Linking with -ffast-math would set the loading thread to flush subnormals."""
_FLOAT32 = """
#define T float
#define NAME(f) f##_f32
#define LOAD(v) (v)
#define STORE(v) (v)
#include "{source}"
#undef T
#undef NAME
#undef LOAD
#undef STORE
"""
_BFLOAT16 = """
#define LT_BFLOAT16
#define T uint16_t
#define NAME(f) f##_bf16
#define LOAD(v) lt_from_bf16(v)
#define STORE(v) lt_to_bf16(v)
#define T_TILES
#include "{source}"
#undef T
#undef NAME
#undef LOAD
#undef STORE
#undef T_TILES
"""


def _steps(dtype: str) -> str:
    """Return the unit of the kernels of a dtype."""
    parts = (dtype.format(source=_SOURCES[name]) for name in ("kernels", "decoder", "draft"))
    first, *others = parts
    return f'{first}#include "{_SOURCES["product"]}"\n{"".join(others)}'


_UNITS = {
    "float32": (_FAST, _steps(_FLOAT32)),
    "bfloat16": (_FAST, _steps(_BFLOAT16)),
    "draws": (
        _EXACT,
        (_FLOAT32 + _BFLOAT16).format(source=_SOURCES["draws"])
        + (_FLOAT32 + _BFLOAT16).format(source=_SOURCES["scores"]),
    ),
}
"""Flags and text of each unit."""

LEVELS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "amx": (
        ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16"),
        ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
    ),
    "bf16": (("avx512f", "avx512_bf16"), ("-march=x86-64-v4", "-mavx512bf16")),
    "avx512": (("avx512f",), ("-march=x86-64-v4",)),
    "avx2": (("avx2", "fma"), ("-march=x86-64-v3",)),
    "neon": (("asimd",), ("-march=armv8-a",)),
}
"""Instructions that a level needs, and its flags; the best levels first."""
SHIPPED = Path(__file__).parent / "shipped"


def flags_of(isa: str) -> tuple[str, ...]:
    """Return the compiler's flags for the processor at hand, within LONGTAIL_ISA = `isa`."""
    if platform.machine() != "x86_64":
        return (*_FLAGS, "-march=native")
    return (*_FLAGS, *_X86, *_ARCHITECTURES[isa])


def digest(flags: Sequence[str], *more: str) -> str:
    """Return the digest of sources, flags and further texts."""
    sources = "".join(path.read_text() for path in _SOURCES.values())
    chosen = (*flags, *_FAST, *_EXACT, *_LINK_FLAGS)
    parts = (sources, _FLOAT32, _BFLOAT16, " ".join(chosen), *more)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def compile_library(compiler: str, flags: Sequence[str], library: Path) -> None:
    """Compile all units into a library. Raises CalledProcessError if the compiler fails."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = compile_units(compiler, flags, Path(scratch))
        _run(compiler, *objects, "-o", library, *_LINK_FLAGS)


def shipped(instructions: Iterable[str], folder: Path = SHIPPED) -> Path | None:
    """Return the library of a wheel for a processor with these instructions; None without any."""
    has = set(instructions)
    for name, (needs, flags) in LEVELS.items():
        path = _shipped_path(name, flags, folder)
        if has.issuperset(needs) and path.is_file():
            return path
    return None


def ship(compiler: str, folder: Path) -> list[Path]:
    """Compile the libraries of all levels of this platform into the folder of a wheel."""
    is_arm, made = platform.machine() != "x86_64", []
    for name, (_, flags) in LEVELS.items():
        if (name == "neon") == is_arm:
            path = _shipped_path(name, flags, folder)
            compile_library(compiler, _level_flags(name, flags), path)
            made.append(path)
    return made


def _level_flags(name: str, flags: Sequence[str]) -> tuple[str, ...]:
    return (*_FLAGS, *(() if name == "neon" else _X86), *flags)


def _shipped_path(name: str, flags: Sequence[str], folder: Path) -> Path:
    return folder / f"{name}-{digest(_level_flags(name, flags))}.so"


def compile_units(compiler: str, flags: Sequence[str], folder: Path) -> list[Path]:
    """Compile each unit in a folder and return the object files.

    Raises CalledProcessError if the compiler fails.
    """

    def compiled(name: str) -> Path:
        own, text = _UNITS[name]
        unit, object_file = folder / f"{name}.c", folder / f"{name}.o"
        unit.write_text(text)
        _run(compiler, *flags, *own, "-c", unit, "-o", object_file)
        return object_file

    with ThreadPoolExecutor() as side_by_side:
        return list(side_by_side.map(compiled, _UNITS))


def _run(*command: str | Path) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
