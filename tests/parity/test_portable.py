"""The native kernels on processors that this machine is not, under an emulator or capped.

The C program beside this file checks products and attention; it is compiled with the kernels for
each architecture. Debian: apt-get install gcc-aarch64-linux-gnu qemu-user
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from longtail.model.kernels import build
from longtail.system import machine

PROGRAM = Path(__file__).with_name("portable.c")
ARM, HERE = "aarch64-linux-gnu-gcc", "cc"
TARGETS = {
    "aarch64": (ARM, "-march=armv8-a", ["qemu-aarch64"]),
    "avx512": (HERE, "-march=x86-64-v4", []),
}
"""Compiler, its flag and the emulator; `make test-capped` runs what AVX2 gets."""


def _missing(target: str) -> str | None:
    compiler, _, emulator = TARGETS[target]
    absent = [name for name in (compiler, *emulator) if shutil.which(name) is None]
    if absent:
        return f"needs {' and '.join(absent)}"
    if target == "avx512" and "avx512f" not in machine.cpu_flags():
        return "needs a processor with avx512f"
    return None


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_are_right_and_batch_invariant(target: str, tmp_path: Path) -> None:
    why = _missing(target)
    if why is not None:
        pytest.skip(why)
    compiler, architecture, emulator = TARGETS[target]
    flags = ("-O2", "-ftree-vectorize", "-fno-schedule-insns", "-fopenmp", architecture)
    objects = build.compile_units(compiler, flags, tmp_path)
    program = tmp_path / "portable"
    command = [
        compiler, *flags, str(PROGRAM), *map(str, objects), "-static", "-o", str(program), "-lm",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
