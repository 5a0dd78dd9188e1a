"""Kernels that a wheel ships: the best level that the processor has, of these sources alone."""

from pathlib import Path

import pytest

from longtail.model.kernels import build


def put(folder: Path, *levels: str) -> None:
    for level in levels:
        build._shipped_path(level, build.LEVELS[level][1], folder).touch()


@pytest.mark.parametrize(
    ("instructions", "best"),
    [
        (("avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"), "amx"),
        (("avx2", "fma", "avx512f", "avx512_bf16"), "bf16"),
        (("avx2", "fma"), "avx2"),
        (("asimd",), "neon"),
    ],
)
def test_the_best_level_of_the_processor_is_loaded(tmp_path, instructions, best):
    assert build.shipped(instructions, tmp_path) is None
    put(tmp_path, *build.LEVELS)
    found = build.shipped(instructions, tmp_path)
    assert found is not None
    assert found.name.startswith(f"{best}-")
    assert build.shipped((), tmp_path) is None


def test_a_library_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    put(tmp_path, "avx2")
    monkeypatch.setattr(build, "_FAST", (*build._FAST, "-O3"))
    assert build.shipped(("avx2", "fma"), tmp_path) is None
