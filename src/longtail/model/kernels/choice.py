"""Selection of the kernels for inference, by dtype and device.

CPU, float32 or bfloat16    native kernels, for the head sizes they are built for
GPU, but not float64        Triton's
anything else               PyTorch's operations
"""

from importlib.util import find_spec

import torch

from longtail.errors import ConfigError
from longtail.model.kernels import native
from longtail.model.kernels.draws import Draws, NativeDraws
from longtail.model.kernels.gpu import GpuKernels
from longtail.model.kernels.ops import NATIVE_HEAD_DIMS, Kernels, NativeKernels, TorchKernels
from longtail.model.kernels.pages import PageKernels, TorchPageKernels
from longtail.system import machine


def select_kernels(dtype: torch.dtype, device: torch.device, head_dim: int) -> Kernels:
    """Return the decoder's small operations."""
    if device.type == "cpu" and head_dim in NATIVE_HEAD_DIMS:
        functions = native.functions(dtype)
        if functions is not None:
            return NativeKernels(functions)
    if device.type == "cuda":
        return _gpu_kernels(dtype, device)
    return TorchKernels()


def select_page_kernels(dtype: torch.dtype, device: torch.device) -> PageKernels:
    """Return the attention over a paged KV cache. Raises ConfigError on a GPU without Triton."""
    if device.type != "cuda" or dtype == torch.float64:
        return TorchPageKernels()
    _check_triton()
    from longtail.model.kernels.triton_pages import TritonPageKernels

    return TritonPageKernels()


def select_draws(dtype: torch.dtype, device: torch.device) -> Draws | None:
    """Return the sampling kernels that store no noise; None where the noise is stored."""
    if device.type == "cpu":
        function = native.draws(dtype)
        return None if function is None else NativeDraws(function)
    if device.type != "cuda" or dtype == torch.float64:
        return None
    _check_triton()
    from longtail.model.kernels.triton_draws import TritonDraws

    return TritonDraws()


def _gpu_kernels(dtype: torch.dtype, device: torch.device) -> Kernels:
    pages = select_page_kernels(dtype, device)
    if dtype == torch.float64:
        return GpuKernels(pages)
    from longtail.model.kernels.triton_small import TritonKernels

    return TritonKernels(pages)


def _check_triton() -> None:
    if find_spec("triton") is None:
        raise ConfigError(f"run.device = cuda needs Triton: {machine.pip_install('gpu')}")
