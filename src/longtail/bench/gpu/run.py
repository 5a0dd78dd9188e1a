"""`longtail bench gpu`: the engine on a GPU, against the limits of the GPU.

    checks        the kernels against their definitions, and a row's bits against its batch
    attention     the attention kernel against PyTorch's and against the bandwidth of a copy
    sampling      draws over 152k entries, 256 rows
    small         sum and norm, rotation, SwiGLU, storing: PyTorch, torch.compile and Triton
    steps         decoding, verification and drafting in the shape of Qwen2.5-7B, random weights
    graphs        memory of the CUDA graphs of one strategy and of all

All of it takes some minutes on one GPU. `--device cpu --quick` tries the benchmark itself, with
kernels in Triton's interpreter.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from longtail.bench.common.card import Table, by_position, print_card
from longtail.bench.common.timing import progress
from longtail.bench.options import GpuBenchOptions
from longtail.errors import ConfigError

Line = tuple[str, str, str]


def table(options: GpuBenchOptions, found: Mapping[str, Any]) -> Table:
    """Return a line for each figure."""
    shape = "toy shapes: figures mean nothing" if options.quick else "shape of Qwen2.5-7B, bfloat16"
    title = f"GPU, {found['device']}, {shape}; medians of {options.repeats} runs"
    lines = [*_kernel_lines(found), *_step_lines(found)]
    return Table(title, by_position("part", "measured", "compared with"), lines)


def _kernel_lines(found: Mapping[str, Any]) -> Iterator[Line]:
    yield "copy within the device", f"{found['copy_gb_per_s']:,.0f} GB/s", "read and written"
    checks = {name.replace("_", " "): value for name, value in found.get("checks", {}).items()}
    if "speculation_changes_no_bit" in found:
        checks["batch-invariant speculation changes no bit"] = found["speculation_changes_no_bit"]
    for name, value in checks.items():
        yield f"check: {name}", f"{value:.2g}" if isinstance(value, float) else str(value), ""
    for cell in found.get("attention", ()):
        flex = "" if cell["flex_us"] is None else f", FlexAttention {cell['flex_us']:,.0f} us"
        yield (
            f"attention, {cell['batch']} x {cell['context']}",
            f"{cell['kernel_us']:,.0f} us, {cell['kernel_over_bound']:.2f}x the bound",
            f"SDPA {cell['sdpa_us']:,.0f} us{flex}",
        )
    if one := found.get("sampling"):
        name = f"sampling, {one['rows']} x {one['vocab_size']}"
        yield name, f"{one['fused_us']:,.0f} us", f"noise in memory {one['in_memory_us']:,.0f} us"
    for cell in found.get("small", ()):
        name, share = f"{cell['operation']}, {cell['tokens']}", cell["bandwidth_share"]
        compiled = "" if cell["compiled_us"] is None else f", compiled {cell['compiled_us']:.1f} us"
        measured = f"{cell['kernel_us']:.1f} us, {share:.0%} of the copy's bandwidth"
        yield name, measured, f"PyTorch {cell['torch_us']:.1f} us{compiled}"


def _step_lines(found: Mapping[str, Any]) -> Iterator[Line]:
    for cell in found.get("decode", ()):
        bound = f"{cell['step_over_bound']:.2f}x the bound of {cell['bound_ms']:.2f} ms"
        yield f"decode step, {cell['batch']}", f"{cell['step_ms']:.2f} ms", bound
    for cell in found.get("invariant", ()):
        over = f"{cell['over_plain']:.2f}x the plain one"
        yield f"batch-invariant step, {cell['batch']}", f"{cell['step_ms']:.2f} ms", over
    if one := found.get("verify"):
        over = f"{one['verify_over_decode']:.2f}x a decode step"
        yield f"verify {one['tokens']} tokens", f"{one['verify_ms']:.2f} ms", over
    if one := found.get("draft"):
        over = f"{one['draft_over_decode']:.2f}x a decode step"
        yield f"draft, depth {one['depth']}", f"{one['draft_ms']:.2f} ms", over
    if one := found.get("graphs"):
        single = f"{one['single_strategy_mb']:,.0f} MB for a single strategy"
        yield f"{one['all_graphs']} graphs", f"{one['all_mb']:,.0f} MB", single


def as_json(options: GpuBenchOptions, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the measured parts.

    `sampling_share` is the share of sampling in a decode step of as many requests, None unless both
    were measured.

    Example: {"decode": [{"batch": 1, "step_ms": 4.1, ...}], "sampling_share": 0.01, ...}
    """
    sampling = found.get("sampling", {"rows": None})
    steps = {cell["batch"]: cell["step_ms"] for cell in found.get("decode", ())}
    step_ms = steps.get(sampling["rows"])
    share = None if step_ms is None else sampling["fused_us"] / 1e3 / step_ms
    shown = {name: value for name, value in asdict(options).items() if name != "json"}
    return {**found, "sampling_share": share, "setting": shown}


def run(options: GpuBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line; return 1 if a check failed."""
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {options.device}: PyTorch {torch.__version__} sees no GPU here. The "
            "benchmark needs one NVIDIA GPU with 40 GB or more and PyTorch's CUDA build; "
            "--device cpu --quick tries the benchmark itself"
        )
    from longtail.bench.gpu.measure import measure

    found = measure(options, progress("gpu"))
    result = as_json(options, found)
    print_card([table(options, found)], result, json_only=options.json)
    return 0 if found.get("checks", {"ok": True})["ok"] else 1
