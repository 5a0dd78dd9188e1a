"""Numbers of the host, on their way to a device."""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    numbers: Sequence[int] | Sequence[float] | Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Make a tensor of numbers, without waiting for what the device computes.

    torch.tensor(numbers, device=...) waits for all that was launched on a GPU before, since it
    copies from memory that may be moved. From pinned memory the copy is one more launch.

    Example: to_device([[3, 4], [0, 1]], device) is what torch.tensor makes of it
    """
    tensor = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
