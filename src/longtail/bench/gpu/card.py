"""How `longtail bench gpu` shows what it measured: a table for people, one object for programs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from longtail.bench.gpu.options import Setting

COLUMNS = ("what", "measured", "against")


def title(setting: Setting, found: Mapping[str, Any]) -> str:
    """Say where and of what."""
    shape = "toy shapes: figures mean nothing" if setting.quick else "shape of Qwen2.5-7B, bfloat16"
    return f"GPU, {found['device']}, {shape}; medians of {setting.repeats} runs"


def rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Render what was measured in the columns of COLUMNS."""
    lines = [["copy within the device", f"{found['copy_gb_per_s']:,.0f} GB/s", "read and written"]]
    for name, value in found.get("checks", {}).items():
        lines.append([f"check: {name.replace('_', ' ')}", _short(value), ""])
    if "speculation_changes_no_bit" in found:
        name = "check: batch-invariant, speculation changes no bit"
        lines.append([name, _short(found["speculation_changes_no_bit"]), ""])
    for cell in found.get("attention", ()):
        flex = "" if cell["flex_us"] is None else f", FlexAttention {cell['flex_us']:,.0f} us"
        lines.append(
            [
                f"attention, {cell['batch']} x {cell['context']}",
                f"{cell['kernel_us']:,.0f} us, {cell['kernel_over_bound']:.2f}x the bound",
                f"SDPA {cell['sdpa_us']:,.0f} us{flex}",
            ]
        )
    if (one := found.get("sampling")) is not None:
        what = f"sampling, {one['rows']} x {one['vocab_size']}"
        lines.append(
            [what, f"{one['fused_us']:,.0f} us", f"noise in memory {one['in_memory_us']:,.0f} us"]
        )
    for cell in found.get("small", ()):
        name, share = f"{cell['operation']}, {cell['tokens']}", cell["bandwidth_share"]
        compiled = "" if cell["compiled_us"] is None else f", compiled {cell['compiled_us']:.1f} us"
        measured = f"{cell['kernel_us']:.1f} us, {share:.0%} of the copy's bandwidth"
        lines.append([name, measured, f"PyTorch {cell['torch_us']:.1f} us{compiled}"])
    for cell in found.get("decode", ()):
        against = f"{cell['step_over_bound']:.2f}x the bound of {cell['bound_ms']:.2f} ms"
        lines.append([f"decode step, {cell['batch']}", f"{cell['step_ms']:.2f} ms", against])
    for cell in found.get("invariant", ()):
        name = f"batch-invariant step, {cell['batch']}"
        lines.append(
            [name, f"{cell['step_ms']:.2f} ms", f"{cell['over_plain']:.2f}x the plain one"]
        )
    if (one := found.get("verify")) is not None:
        against = f"{one['verify_over_decode']:.2f}x a decode step"
        lines.append([f"verify {one['tokens']} tokens", f"{one['verify_ms']:.2f} ms", against])
    if (one := found.get("draft")) is not None:
        against = f"{one['draft_over_decode']:.2f}x a decode step"
        lines.append([f"draft, depth {one['depth']}", f"{one['draft_ms']:.2f} ms", against])
    if (one := found.get("graphs")) is not None:
        against = f"{one['single_strategy_mb']:,.0f} MB of a single strategy"
        lines.append([f"{one['all_graphs']} graphs", f"{one['all_mb']:,.0f} MB", against])
    for cell in found.get("speculation", ()):
        against = f"{cell['speedup']:.2f}x, accept length {cell['accept_length']:.2f}"
        name = f"speculation, {cell['batch']} running"
        lines.append([name, f"{cell['tokens_per_s']:,.0f} tokens/s", against])
        gap, off = (f"{cell[key]:,.0f} us" for key in ("gap_us", "off_gap_us"))
        lines.append([f"host gap a step, {cell['batch']} running", gap, f"{off} without drafts"])
    if (one := found.get("training")) is not None:
        for arm, step in one["step_speedup"].items():
            rollout, differing = one["rollout_speedup"][arm], one["differing_share"][arm]
            against = f"rollout {rollout['median']:.2f}x of off, {differing:.2%} of texts differ"
            lines.append([f"training step, {arm}", f"{step['median']:.2f}x of off", against])
    return lines


def as_json(setting: Setting, found: Mapping[str, Any]) -> dict[str, Any]:
    """Arrange the figures; parts that were left out are not there.

    `sampling_share` is that of a decode step of as many requests, null unless both were measured.

    Example: {"decode": [{"batch": 1, "step_ms": 4.1, ...}], "sampling_share": 0.01, ...}
    """
    one = found.get("sampling")
    steps = {cell["batch"]: cell["step_ms"] for cell in found.get("decode", ())}
    step_ms = None if one is None else steps.get(one["rows"])
    share = None if one is None or step_ms is None else one["fused_us"] / 1e3 / step_ms
    return {**found, "sampling_share": share, "setting": asdict(setting)}


def _short(value: object) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
