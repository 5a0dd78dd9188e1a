"""Tensors on disk (safetensors), checked where they are read: a file may come from elsewhere.

    save                   tensors --> a file
    open_tensors, read     a file --> what each tensor is, compared with what is wanted --> tensors

Memory is taken after the comparison, and no kernel sees a tensor that is not what it must be. Every
error is a ConfigError with file, tensor, what it is, what is wanted, and the remedy.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longtail.errors import ConfigError

FLOATS = ("float32", "bfloat16", "float16", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
    "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_AGAIN = "copy the file again"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Shape and type of a tensor, as it is or must be."""

    shape: tuple[int | None, ...]
    """Sizes; None admits any."""
    dtypes: tuple[str, ...] = FLOATS
    """PyTorch's names of the admitted types."""
    below: int | None = None
    """Bound of token ids, which are from 0 on; None: other numbers, which must be finite."""
    is_distinct: bool = False
    """Whether no token id may come twice."""

    @staticmethod
    def of(tensor: Tensor) -> "Kind":
        """Return what a tensor is."""
        return Kind(shape=tuple(tensor.shape), dtypes=(str(tensor.dtype).removeprefix("torch."),))

    def admits(self, found: "Kind") -> bool:
        """Return whether a tensor that is `found` has an admitted shape and type."""
        sizes = zip_longest(self.shape, found.shape, fillvalue=-1)
        is_shaped = all(mine in (None, theirs) and theirs != -1 for mine, theirs in sizes)
        return is_shaped and found.dtypes[0] in self.dtypes

    def fault(self, tensor: Tensor) -> str:
        """Return what is wrong with the numbers of an admitted tensor; "" if nothing is."""
        if not tensor.numel():
            return ""
        low, high = torch.aminmax(tensor)  # NaN if any is NaN; no large temporary
        if self.below is not None and (low < 0 or high >= self.below):
            return f"holds the token {int(low if low < 0 else high)}, of {self.below} tokens"
        if self.is_distinct and len(set(tensor.tolist())) != len(tensor):
            return "holds a token twice"
        if tensor.is_floating_point() and not torch.stack((low, high)).isfinite().all():
            bad = int((~tensor.isfinite()).sum())
            return f"holds {bad} values that are NaN or infinite of {tensor.numel()}"
        return ""

    def __str__(self) -> str:
        sizes = ", ".join("any" if size is None else str(size) for size in self.shape)
        return f"{' or '.join(self.dtypes)} of shape [{sizes}]"


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Return what each of some tensors is."""
    return {name: Kind.of(tensor) for name, tensor in tensors.items()}


Wanted = Mapping[str, Kind]
"""Wanted tensors of a file, by name."""


def require(where: object, found: Wanted, wanted: Wanted, remedy: str = _AGAIN) -> None:
    """Raise ConfigError, beginning with `where`, unless exactly the wanted tensors are there."""
    if missing := wanted.keys() - found.keys():
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{where} lacks {min(missing)}{more}: {remedy}")
    for name, kind in found.items():
        if name not in wanted:
            raise ConfigError(f"{where} holds {name!a}, {kind}, which is not wanted: {remedy}")
        if not wanted[name].admits(kind):
            raise ConfigError(f"{where}: {name} is {kind}, wanted is {wanted[name]}: {remedy}")


@final
class TensorFile:
    """An open file."""

    def __init__(self, path: Path, handle: Any) -> None:
        self.path, self._handle = path, handle
        self.kinds: dict[str, Kind] = {}
        """Kind of each tensor, by its header."""
        for name in handle.keys():  # noqa: SIM118  (a handle is not a mapping)
            header = handle.get_slice(name)
            dtype = header.get_dtype()
            shape = tuple(header.get_shape())
            self.kinds[name] = Kind(shape=shape, dtypes=(_DTYPES.get(dtype, dtype),))

    def read(self, name: str, kind: Kind | None = None, remedy: str = _AGAIN) -> Tensor:
        """Return a tensor whose numbers are those of its kind (default: finite)."""
        tensor: Tensor = self._handle.get_tensor(name)
        if fault := (kind or self.kinds[name]).fault(tensor):
            raise ConfigError(f"{self.path}: {name} {fault}: {remedy}")
        return tensor

    def read_all(self, wanted: Wanted | None = None, remedy: str = _AGAIN) -> dict[str, Tensor]:
        """Return the tensors; require exactly the wanted ones (None: accept any)."""
        if wanted is not None:
            require(self.path, self.kinds, wanted, remedy)
        kinds = self.kinds if wanted is None else wanted
        return {name: self.read(name, kinds[name], remedy) for name in self.kinds}


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorFile]:
    """Open a file; ConfigError if it is none, or damaged."""
    try:
        if not os.path.isfile(path):  # a pipe would be waited for
            raise FileNotFoundError("no such file")
        handle = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} is not a readable safetensors file ({error}): {_AGAIN}"
        ) from error
    with handle:
        yield TensorFile(path, handle)


def read(path: Path, wanted: Wanted | None = None, remedy: str = _AGAIN) -> dict[str, Tensor]:
    """Read a file whole, as stored, into CPU memory; None: whatever it holds, all finite."""
    with open_tensors(path) as file:
        return file.read_all(wanted, remedy)


def save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors of any device, no two of which overlap, to one file; OSError if it fails."""
    content = {name: each.detach().cpu().contiguous() for name, each in tensors.items()}
    with disk_errors():
        save_file(content, path, metadata={"format": "pt"})


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise OSError for what safetensors raises if it cannot write in this context."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(str(error)) from error
