"""Kernels that a wheel ships: the best level that the processor has, of these sources alone."""

from pathlib import Path

import pytest

from longtail.model.kernels import library


def put(folder: Path, *levels: str) -> None:
    for level in levels:
        library._shipped_path(level, library.LEVELS[level][1], folder).touch()


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
    assert library.shipped(instructions, tmp_path) is None
    put(tmp_path, *library.LEVELS)
    found = library.shipped(instructions, tmp_path)
    assert found is not None
    assert found.name.startswith(f"{best}-")
    assert library.shipped((), tmp_path) is None


def test_a_library_of_other_sources_is_not_loaded(tmp_path, monkeypatch):
    put(tmp_path, "avx2")
    monkeypatch.setattr(library, "_FAST", (*library._FAST, "-O3"))
    assert library.shipped(("avx2", "fma"), tmp_path) is None
