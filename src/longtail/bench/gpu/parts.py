"""What `longtail bench gpu` measures, part by part, and in which shapes."""

import gc
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from longtail.bench.gpu import kernels, small, steps
from longtail.bench.gpu.clock import DeviceClock
from longtail.bench.gpu.kernels import Heads
from longtail.bench.gpu.options import Setting
from longtail.bench.gpu.speculation import (
    changes_no_bit,
    grown_subject,
    random_subject,
    speculation,
)
from longtail.bench.gpu.training import training
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
    """How large what is measured is.

    Example: REAL
    """

    shape: ModelConfig
    dtype: torch.dtype
    batches: tuple[int, ...]
    attention: tuple[tuple[int, int], ...]
    """Batch and context of each cell."""
    check_context: int
    sampled_rows: int
    copy_bytes: int
    speculation_batches: tuple[int, ...]
    tokens: int
    """Of a rollout with one request running."""


REAL = Sizes(
    shape=QWEN_7B,
    dtype=torch.bfloat16,
    batches=(1, 32, 256),
    attention=((1, 4096), (32, 4096), (256, 1024)),
    check_context=3000,
    sampled_rows=256,
    copy_bytes=4 * 2**30,
    speculation_batches=(1, 8, 32, 128),
    tokens=384,
)
QUICK = Sizes(
    shape=TOY,
    dtype=torch.float32,
    batches=(1, 3),
    attention=((2, 40),),
    check_context=70,
    sampled_rows=3,
    copy_bytes=2**16,
    speculation_batches=(1, 4),
    tokens=20,
)


@final
class _Notes:
    """What was measured so far; told at once, so that nothing is lost if a later part fails."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.found: dict[str, Any] = {}
        self._say = say

    def add(self, name: str, value: object) -> None:
        """Note a figure."""
        self.found[name] = value
        self._say(f"{name}: {json.dumps(value)}")


def measure(setting: Setting, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure the parts that were asked for; those left out are not in the result."""
    device = torch.device(setting.device)
    sizes = QUICK if setting.quick else REAL
    clock, shape = DeviceClock(device, setting.repeats), sizes.shape
    heads = Heads(queries=shape.num_heads, keys=shape.num_kv_heads, dim=shape.head_dim)
    bandwidth = kernels.copy_bandwidth(clock, sizes.copy_bytes)
    notes = _Notes(say)
    notes.add("device", _name(device))
    notes.add("copy_gb_per_s", bandwidth / 1e9)
    if "checks" in setting.parts:
        long = sizes.check_context
        checks = small.checks(shape, device)
        checks |= kernels.checks(heads, shape.vocab_size, device, long=long)
        checks["ok"] = checks["ok"] and checks["small_ok"]
        notes.add("checks", checks)
        notes.add("speculation_changes_no_bit", changes_no_bit(TOY, sizes.dtype, device))
    if "attention" in setting.parts:
        cells = [
            kernels.attention(heads, clock, bandwidth, batch=batch, context=context)
            for batch, context in sizes.attention
        ]
        notes.add("attention", cells)
    if "sampling" in setting.parts:
        rows = sizes.sampled_rows
        notes.add("sampling", kernels.sampling(shape.vocab_size, rows, clock, bandwidth))
    if "small" in setting.parts:
        cells = small.operations(shape, sizes.dtype, clock, bandwidth, sizes.batches)
        notes.add("small", cells)
    if {"steps", "graphs"} & set(setting.parts):
        _model_parts(setting, sizes, clock, bandwidth, notes)
        _free(device)
    if "speculation" in setting.parts:
        subject = (
            random_subject(shape, sizes.dtype, device)
            if setting.quick
            else grown_subject(shape, device, say)
        )
        batches = sizes.speculation_batches
        notes.add("speculation", speculation(subject, batches, sizes.tokens, say))
        del subject
        _free(device)
    if "training" in setting.parts:
        notes.add("training", training(setting.device, say, quick=setting.quick))
    return notes.found


def _model_parts(
    setting: Setting,
    sizes: Sizes,
    clock: DeviceClock,
    bandwidth: float,
    notes: "_Notes",
) -> None:
    """Measure what needs the whole model."""
    model = steps.random_model(sizes.shape, sizes.dtype, clock.device)
    model.pack()
    if "steps" in setting.parts:
        cells = steps.decode_steps(model, clock, bandwidth, sizes.batches)
        notes.add("decode", cells)
        notes.add("verify", steps.verify_step(model, clock))
        notes.add("draft", steps.draft_pass(model, clock, cells[0]["step_ms"]))
        notes.add("invariant", steps.invariant_steps(model, clock, cells))
    if "graphs" in setting.parts:
        notes.add("graphs", steps.graph_memory(model))


def _free(device: torch.device) -> None:
    """Give a model's memory back before the next is made."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
