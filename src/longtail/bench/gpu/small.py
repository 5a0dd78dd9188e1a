"""Small operations of `longtail bench gpu`: PyTorch, torch.compile and Triton.

They are captured and replayed, as in a step, so that launches are not timed. Inputs may lie in the
L2 cache, as in a step, so that the share of a copy's bandwidth may be above 1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longtail.bench.gpu.kernels import DeviceClock, kernels_here
from longtail.model.graphs import CudaGraphs, Outputs
from longtail.model.kernels.ops import Kernels, TorchKernels
from longtail.model.rope import Rope, Rotation
from longtail.model.transformer import ModelConfig

_CALLS = 20
"""Number of calls captured together."""
_CHECKED = 9
"""Number of tokens."""
_ROW_LEN = 64
_TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 3 * 2**-7}
"""Errors relative to values of 1 and more; for bfloat16, one unit in the last place a rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    name: str
    call: Callable[..., Sequence[Tensor]]
    """Function of kernels and inputs; its results have a row for each token, as the inputs do."""
    inputs: tuple[Tensor, ...]
    num_bytes: int
    """Bytes read and written, each number once."""


def _operations(
    shape: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[_Operation]:
    """Return the operations of one layer, on random rows."""
    generator = torch.Generator(device).manual_seed(0)
    heads, kv_heads, dim, eps = shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.norm_eps

    def normal(*size: int) -> Tensor:
        return torch.randn((tokens, *size), generator=generator, device=device).to(dtype)

    stream, delta = normal(shape.hidden_size), normal(shape.hidden_size)
    gate_up, qkv = normal(2 * shape.intermediate_size), normal(heads + 2 * kv_heads, dim)
    weight, rows = stream[0].clone(), torch.arange(tokens, device=device)
    key_rows, value_rows = (normal(_ROW_LEN, kv_heads, dim) for _ in range(2))
    angles = Rope(dim, shape.rope).rotation(37 * rows, dtype)
    _, keys, values = torch.split(qkv, [heads, kv_heads, kv_heads], 1)

    def store(kernels: Kernels, *new: Tensor) -> Sequence[Tensor]:
        keys, values, rows, slots = new
        kernels.store_rows(keys, values, key_rows, value_rows, rows, slots)
        return ()

    head_bytes = tokens * dim * dtype.itemsize
    return [
        _Operation(
            name="add_norm",
            call=lambda kernels, stream, delta: kernels.add_norm(stream, delta, weight, eps),
            inputs=(stream, delta),
            num_bytes=4 * stream.nbytes + weight.nbytes,
        ),
        _Operation(
            name="rotate",
            call=lambda kernels, qkv, cos, sin: kernels.rotate(
                qkv, heads, None, None, eps, Rotation(cos=cos, sin=sin)
            ),
            inputs=(qkv, angles.cos, angles.sin),
            num_bytes=2 * (heads + kv_heads + 1) * head_bytes,
        ),
        _Operation(
            name="swiglu",
            call=lambda kernels, gate_up: (kernels.swiglu(gate_up),),
            inputs=(gate_up,),
            num_bytes=3 * gate_up.nbytes // 2,
        ),
        _Operation(
            name="store_rows",
            call=store,
            inputs=(keys, values, rows, rows % _ROW_LEN),
            num_bytes=4 * kv_heads * head_bytes,
        ),
    ]


@torch.inference_mode()
def checks(shape: ModelConfig, device: torch.device, kernels: Kernels) -> dict[str, Any]:
    """Compare results with the definition's on the same device, and rows with the same alone."""
    definition = TorchKernels()
    found: dict[str, Any] = {}
    alike = True
    for dtype, tolerance in _TOLERANCES.items():
        error = 0.0
        for each in _operations(shape, _CHECKED, dtype, device):
            together = each.call(kernels, *each.inputs)
            for one, other in zip(together, each.call(definition, *each.inputs), strict=True):
                size = other.double().abs().clamp(min=1.0)
                error = max(error, float(((one.double() - other.double()).abs() / size).max()))
            for token in range(_CHECKED):
                row = slice(token, token + 1)
                alone = each.call(kernels, *(x[row].clone() for x in each.inputs))
                alike &= all(a.equal(b[row]) for a, b in zip(alone, together, strict=True))
        name = str(dtype).removeprefix("torch.")
        found[f"small_error_{name}"] = error
        found[f"small_ok_{name}"] = error <= tolerance
    found["small_bits_do_not_depend_on_the_batch"] = alike
    found["small_ok"] = alike and all(value for name, value in found.items() if "_ok_" in name)
    return found


@torch.inference_mode()
def operations(
    shape: ModelConfig,
    dtype: torch.dtype,
    clock: DeviceClock,
    bandwidth: float,
    batches: Sequence[int],
) -> list[dict[str, Any]]:
    """Time each operation for each number of tokens."""
    kernels, definition = kernels_here().small, TorchKernels()
    cells = []
    for tokens in batches:
        for each in _operations(shape, tokens, dtype, clock.device):
            kernel_s = _seconds(clock, partial(each.call, kernels, *each.inputs))
            torch_s = _seconds(clock, partial(each.call, definition, *each.inputs))
            cells.append(
                {
                    "operation": each.name,
                    "tokens": tokens,
                    "kernel_us": kernel_s * 1e6,
                    "torch_us": torch_s * 1e6,
                    "compiled_us": _compiled_us(clock, each),
                    "bandwidth_share": each.num_bytes / kernel_s / bandwidth,
                }
            )
    return cells


def _compiled_us(clock: DeviceClock, operation: _Operation) -> float | None:
    """Return the microseconds of the compiled operation; None where it cannot be compiled."""
    if clock.device.type == "cpu":
        return None
    # Not a `partial`: all partials share one code object, and so its limit of compilations.
    compiled = torch.compile(operation.call, dynamic=False)
    try:
        return _seconds(clock, partial(compiled, TorchKernels(), *operation.inputs)) * 1e6
    except (RuntimeError, ValueError, AssertionError):
        return None


def _seconds(clock: DeviceClock, run: Callable[[], object]) -> float:
    """Return the seconds of one call among many that are replayed; on a CPU, of one call."""
    if clock.device.type == "cpu":
        return clock.seconds(run)

    def body() -> Outputs:
        for _ in range(_CALLS):
            run()
        return ()

    replay, _ = CudaGraphs(clock.device).capture(body)
    return clock.seconds(replay) / _CALLS
