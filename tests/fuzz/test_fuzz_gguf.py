"""GGUF files with any bytes changed: a model, or the documented error; no endless read."""

import contextlib
import functools
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.errors import LongtailError
from longtail.model.sources.gguf import convert
from support.gguf_files import VOCAB_SIZE, write_gguf
from support.tiny_models import tiny_model

_HEADER = 6_000
"""Number of bytes before the tensors, about."""

numbers = st.sampled_from([0, 1, 8, 9, 255, 2**16, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1)
changes = st.lists(
    st.tuples(st.integers(0, _HEADER), numbers.map(lambda n: struct.pack("<I", n))), max_size=4
)


@functools.cache
def valid_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tiny.gguf")
        write_gguf(path, tiny_model("llama", VOCAB_SIZE))
        return path.read_bytes()


def _convert(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "any.gguf")
        file.write_bytes(content)
        with contextlib.suppress(LongtailError):
            convert(file, Path(folder, "model"), "model.path = 'any.gguf'")


@pytest.mark.slow
@given(changes)
def test_a_changed_file_is_a_model_or_refused(changes: list[tuple[int, bytes]]) -> None:
    changed = bytearray(valid_file())
    for place, number in changes:
        changed[place : place + 4] = number
    _convert(bytes(changed))


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_refused(tail: bytes) -> None:
    _convert(b"GGUF\x03\x00\x00\x00" + tail)
