"""Reader of GGUF files: header, metadata and tensors, each checked against the size of the file.

    magic, version, number of tensors, number of metadata pairs
    metadata: name, type, value
    tensors: name, dimensions, type, offset
    data of the tensors, aligned

The `gguf` package has the block formats and their dequantisation. Its own reader trusts the counts
of the file, so a malformed file could make it loop; this one raises ConfigError.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from longtail.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
"""Struct formats of the scalar types; type 8 is a string, type 9 an array."""
_STRING, _ARRAY = 8, 9
_MAX_PAIRS, _MAX_TENSORS, _MAX_ELEMENTS = 10_000, 200_000, 1 << 22
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 16
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Place and format of a tensor.

    Example: TensorInfo(shape=(576, 576), kind="Q4_1", start=8192, num_bytes=207360)
    """

    shape: tuple[int, ...]
    """Rows first."""
    kind: str
    """Name of the block format."""
    start: int
    """Offset in the file, bytes."""
    num_bytes: int


@final
class GGUFFile:
    """A GGUF file, mapped into memory. Raises ConfigError, beginning with `where`."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        self._data = _mapped(path, where)
        cursor = _Cursor(self._data, where)
        num_tensors, num_pairs = _counts(cursor)
        self.metadata: dict[str, Any] = {}
        """Values by name; an array of numbers is a numpy array."""
        for _ in range(num_pairs):
            name = cursor.text()
            self.metadata[name] = cursor.value(cursor.number("I"))
        infos = [_tensor_info(cursor) for _ in range(num_tensors)]
        start = _aligned(cursor.position, self.metadata.get("general.alignment", _ALIGNMENT), where)
        self.tensors = {
            name: _located(name, shape, kind, start + offset, self)
            for name, shape, kind, offset in infos
        }
        """Tensors by name."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self._data)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in float32."""
        import gguf

        info = self.tensors[name]
        packed = np.frombuffer(self._data, np.uint8, info.num_bytes, info.start).copy()
        rows = packed.reshape(math.prod(info.shape[:-1]), -1)
        try:
            values = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.kind])
        except NotImplementedError as error:
            raise self.error(f"{name} is stored as {info.kind}, which is no float") from error
        return torch.from_numpy(np.ascontiguousarray(values, np.float32).reshape(info.shape))

    def dtype(self) -> torch.dtype:
        """Return the dtype that holds the matrices: their own, bfloat16 for quantised ones."""
        kinds = {info.kind for info in self.tensors.values() if len(info.shape) > 1}
        if kinds <= {"F16", "F32"}:
            return _FLOATS["F16" if "F16" in kinds else "F32"]
        return torch.bfloat16

    def error(self, what: str, remedy: str = "") -> ConfigError:
        """Return an error about the file."""
        return _malformed(self.where, what, remedy)


def _malformed(where: str, what: str, remedy: str = "") -> ConfigError:
    return ConfigError(f"{where}: {what}; {remedy or 'download the file again'}")


def _mapped(path: Path, where: str) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise _malformed(where, f"the file cannot be read ({error})") from error


def _counts(cursor: "_Cursor") -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata pairs."""
    if cursor.take(len(_MAGIC)) != _MAGIC:
        raise _malformed(cursor.where, "it does not begin with the letters GGUF, so it is no model")
    version = cursor.number("I")
    if version not in _VERSIONS:
        raise _malformed(
            cursor.where,
            f"GGUF version {version} is not supported",
            f"convert it to a little-endian file of version {_VERSIONS[-1]}",
        )
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    for count, most, what in (
        (num_tensors, _MAX_TENSORS, "tensors"),
        (num_pairs, _MAX_PAIRS, "metadata values"),
    ):
        if count > most:
            raise _malformed(cursor.where, f"its header counts {count} {what}, above {most}")
    return num_tensors, num_pairs


@final
class _Cursor:
    """Sequential reads, none of them beyond the end of the file."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data, self.where, self.position = data, where, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        end = self.position + count
        if end > len(self._data):
            raise _malformed(
                self.where,
                f"it is cut off: its header goes beyond byte {len(self._data)}",
            )
        found = self._data[self.position : end]
        self.position = end
        return found

    def number(self, kind: str) -> Any:
        """Return the next number, by its struct format."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        """Return the next string."""
        start = self.position
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            raise _malformed(self.where, f"the string at byte {start} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        """Return the next metadata value of a type."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise _malformed(self.where, f"a metadata value has the unknown type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > _MAX_ELEMENTS or (inner != _STRING and inner not in _SCALARS):
            raise _malformed(
                self.where, f"an array of its metadata has {count} elements of type {inner}"
            )
        if inner == _STRING:
            return [self.text() for _ in range(count)]
        dtype = np.dtype(f"<{_SCALARS[inner]}" if inner != 7 else "?")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, shape, type and offset of the next tensor."""
    name, num_dimensions = cursor.text(), cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise _malformed(cursor.where, f"{name!r:.80} has {num_dimensions} dimensions")
    dimensions = [cursor.number("Q") for _ in range(num_dimensions)]
    return name, tuple(reversed(dimensions)), cursor.number("I"), cursor.number("Q")


def _aligned(position: int, alignment: Any, where: str) -> int:
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise _malformed(where, f"general.alignment = {alignment!r:.80}")
    return -(-position // alignment) * alignment


def _located(
    name: str, shape: tuple[int, ...], kind: int, start: int, file: GGUFFile
) -> TensorInfo:
    """Return the place of a tensor, which lies within the file."""
    import gguf

    try:
        named = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise file.error(
            f"{name!r:.80} has the unknown type {kind}",
            "use a file of another quantisation, or a newer gguf package",
        ) from error
    block, size = gguf.GGML_QUANT_SIZES[named]
    if 0 in shape or shape[-1] % block:
        raise file.error(f"{name!r:.80} has shape {list(shape)}, impossible as {named.name}")
    num_bytes = math.prod(shape) // block * size
    if start + num_bytes > file.num_bytes:
        raise file.error(
            f"{name!r:.80} ends at byte {start + num_bytes} of a file of {file.num_bytes}, so the "
            "file is cut off"
        )
    return TensorInfo(shape=shape, kind=named.name, start=start, num_bytes=num_bytes)
