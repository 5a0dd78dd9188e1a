"""Tensors parked in a file: their memory is free until it is taken back.

    write(tensors, path)    copies their bytes into one file, synced
    release(tensors)        frees their memory; the tensors stay the same objects, without content
    read(tensors, path)     allocates it again, with the bytes of the file

The file has no header: it is read by the tensors that wrote it, in the same order, or by a replica
of them.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def write(tensors: Iterable[Tensor], path: Path) -> None:
    """Write the bytes of all tensors; on return they are on disk, and no write is pending."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(_bytes(tensor.detach().cpu().contiguous()).data)
        file.flush()
        os.fsync(file.fileno())


def release(tensors: Iterable[Tensor]) -> None:
    """Free the memory of tensors that share it with no other."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        assert storage.nbytes() == tensor.nbytes, "a tensor that owns its memory"
        storage.resize_(0)


def read(tensors: Iterable[Tensor], path: Path) -> None:
    """Allocate the memory of released tensors and fill it from the file."""
    with path.open("rb") as file:
        for tensor in tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
            on_cpu = torch.empty(tensor.shape, dtype=tensor.dtype)
            found = file.readinto(_bytes(on_cpu).data)
            assert found == tensor.nbytes, f"{path} is shorter than what was parked in it"
            tensor.detach().copy_(on_cpu)


def _bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a dense tensor on the CPU, without a copy."""
    return tensor.view(-1).view(torch.uint8).numpy()
