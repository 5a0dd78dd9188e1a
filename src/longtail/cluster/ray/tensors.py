"""Tensors pass through Ray as arrays."""

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor


def send_tensors_as_arrays() -> None:
    """Ray copies an array once on each side, and a pickled tensor several times."""
    ray.util.register_serializer(Tensor, serializer=_as_array, deserializer=_as_tensor)


def _as_array(tensor: Tensor) -> tuple[NDArray[np.uint8], torch.dtype, torch.Size]:
    """Return the bytes of a tensor, which may have a type that arrays lack."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).numpy(), tensor.dtype, tensor.shape


def _as_tensor(sent: tuple[NDArray[np.uint8], torch.dtype, torch.Size]) -> Tensor:
    array, dtype, shape = sent
    return torch.from_numpy(array.copy()).view(dtype).reshape(shape)
