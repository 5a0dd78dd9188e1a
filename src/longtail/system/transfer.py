"""Transfer of numbers from the host to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Make a tensor on a device without waiting for the device.

    torch.tensor(numbers, device=...) copies from pageable memory, so on a GPU it waits for all
    earlier launches. A copy from pinned memory is one more asynchronous launch.

    Example: to_device([[3, 4], [0, 1]], device) equals torch.tensor([[3, 4], [0, 1]])
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
