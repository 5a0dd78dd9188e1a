"""Selection of the kernels for inference: native ones in float32 or bfloat16, else PyTorch's."""

import torch

from longtail.model.kernels import native
from longtail.model.kernels.draws import NativeDraws
from longtail.model.kernels.ops import NATIVE_HEAD_DIMS, Kernels, NativeKernels, TorchKernels


def select_kernels(dtype: torch.dtype, head_dim: int) -> Kernels:
    """Return the decoder's small operations; native ones are built for some head sizes."""
    functions = native.functions(dtype) if head_dim in NATIVE_HEAD_DIMS else None
    return TorchKernels() if functions is None else NativeKernels(functions)


def select_draws(dtype: torch.dtype) -> NativeDraws | None:
    """Return the sampling that stores no noise; None where the noise is stored."""
    function = native.draws(dtype)
    return None if function is None else NativeDraws(function)
