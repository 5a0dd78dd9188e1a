"""Parts of `longtail bench gpu`, and the shapes in which they are measured."""

import gc
import json
from dataclasses import dataclass
from typing import Any

import torch

from longtail.bench.common.timing import Log
from longtail.bench.gpu import kernels, small, steps
from longtail.bench.gpu.kernels import DeviceClock, Heads
from longtail.bench.options import GpuBenchOptions
from longtail.model.rope import RopeConfig
from longtail.model.transformer import ModelConfig

QWEN_7B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    max_positions=32_768,
    rope=RopeConfig(theta=1e6),
    qkv_bias=True,
)
"""Qwen2.5-7B."""
TOY = ModelConfig(
    family="qwen2",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    qkv_bias=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of what is measured."""

    shape: ModelConfig
    dtype: torch.dtype
    batches: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    """Batch size and context of each cell."""
    check_context: int
    sampled_rows: int
    copy_bytes: int


REAL = Sizes(
    shape=QWEN_7B,
    dtype=torch.bfloat16,
    batches=(1, 32, 256),
    attention=((1, 4096), (32, 4096), (256, 1024)),
    check_context=3000,
    sampled_rows=256,
    copy_bytes=4 * 2**30,
)
QUICK = Sizes(
    shape=TOY,
    dtype=torch.float32,
    batches=(1, 3),
    attention=((2, 40),),
    check_context=70,
    sampled_rows=3,
    copy_bytes=2**16,
)


def measure(options: GpuBenchOptions, log: Log) -> dict[str, Any]:
    """Measure the chosen parts; each figure is logged at once, in case a later part fails."""
    found: dict[str, Any] = {}

    def add(name: str, value: object) -> None:
        found[name] = value
        log(f"{name}: {json.dumps(value)}")

    parts, device = options.parts, torch.device(options.device)
    sizes = QUICK if options.quick else REAL
    clock, shape = DeviceClock(device, options.repeats), sizes.shape
    heads = Heads(queries=shape.num_heads, keys=shape.num_kv_heads, dim=shape.head_dim)
    bandwidth = kernels.copy_bandwidth(clock, sizes.copy_bytes)
    add("device", torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
    add("copy_gb_per_s", bandwidth / 1e9)
    if "checks" in parts:
        checks = small.checks(shape, device, kernels.kernels_here().small)
        checks |= kernels.checks(heads, shape.vocab_size, device, long=sizes.check_context)
        checks["ok"] = checks["ok"] and checks["small_ok"]
        add("checks", checks)
        add("speculation_changes_no_bit", steps.changes_no_bit(TOY, sizes.dtype, device))
    if "attention" in parts:
        cells = [
            kernels.attention(heads, clock, bandwidth, batch=batch, context=context)
            for batch, context in sizes.attention
        ]
        add("attention", cells)
    if "sampling" in parts:
        rows = sizes.sampled_rows
        add("sampling", kernels.sampling(shape.vocab_size, rows, clock, bandwidth))
    if "small" in parts:
        add("small", small.operations(shape, sizes.dtype, clock, bandwidth, sizes.batches))
    if {"steps", "graphs"} & set(parts):
        model = steps.random_model(shape, sizes.dtype, device)
        model.pack()
        if "steps" in parts:
            cells = steps.decode_steps(model, clock, bandwidth, sizes.batches)
            add("decode", cells)
            add("verify", steps.verify_step(model, clock))
            add("draft", steps.draft_pass(model, clock, cells[0]["step_ms"]))
            add("invariant", steps.invariant_steps(model, clock, cells))
        if "graphs" in parts:
            add("graphs", steps.graph_memory(model))
        del model
        _free(device)
    return found


def _free(device: torch.device) -> None:
    """Return a model's memory before the next is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
