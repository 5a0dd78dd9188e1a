"""Values of `auto` on a device, and the lines about what a precision costs or does not keep.

    rollout.dtype, target.dtype        bfloat16 where inference in it is fast, else float32
    learner.autocast, train.autocast   on where the hardware multiplies bfloat16 (not in float64)

Inference needs less than training: native kernels widen bfloat16 in registers, so it is fast on
any processor that they are built for.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch

from longtail.assembly.device import AnyConfig, run_device
from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.model.kernels import native
from longtail.run.checkpoint import CONFIG_FILE, steps_in
from longtail.system.device import DTYPES, multiplies_bfloat16

Config = TypeVar("Config", RunConfig, SftConfig, DrafterTrainConfig)

_EMULATED = "bfloat16 is emulated on this processor"
_DTYPE_FIELDS = (("rollout", "dtype"), ("target", "dtype"))
_AUTOCAST_FIELDS = (("learner", "autocast"), ("train", "autocast"))


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether inference in a dtype is not emulated on a device."""
    if dtype == torch.float16:
        return False
    if dtype != torch.bfloat16 or multiplies_bfloat16(device):
        return True
    return device.type == "cpu" and native.layout(dtype) is not None  # may compile: last


def fastest_dtype(device: torch.device) -> str:
    """Return the dtype of fastest inference on a device: "bfloat16" or "float32"."""
    return "bfloat16" if is_fast(torch.bfloat16, device) else "float32"


def is_exact(dtype: torch.dtype) -> bool:
    """Return whether a text does not depend on its batch, hence not on drafting."""
    return dtype == torch.float64 or native.layout(dtype) is not None


def decided(config: Config) -> Config:
    """Return the configuration with a value for each `auto`.

    A run that is resumed keeps the values that it was begun with.
    """
    begun = _begun(Path(config.run.dir)) if config.run.resume else ""
    device = run_device(config)
    for section, field in (*_DTYPE_FIELDS, *_AUTOCAST_FIELDS):  # autocast depends on a dtype
        if _value(config, section, field) != "auto":
            continue
        value = files.lookup(begun, f"{section}.{field}")
        if field == "dtype":
            value = value if value in list(DTYPES) else _dtype(config, section, device)
        elif not isinstance(value, bool):
            given = (_value(config, name, "dtype") for name in ("learner", "target"))
            value = "float64" not in given and multiplies_bfloat16(device)
        changed = getattr(config, section).model_copy(update={field: value})
        config = config.model_copy(update={section: changed})
    return config


def _dtype(config: AnyConfig, section: str, device: torch.device) -> str:
    """Return the fastest dtype; vLLM's products on a CPU are batch-invariant in float32 alone."""
    is_vllm = _value(config, section, "engine") == "vllm"
    return "float32" if is_vllm and device.type == "cpu" else fastest_dtype(device)


def _begun(run_dir: Path) -> str:
    """Return the configuration of the run that a start would resume; empty if there is none."""
    file = run_dir / CONFIG_FILE
    try:
        text = file.read_text(encoding="utf-8") if steps_in(run_dir / "checkpoints") else ""
        files.lookup(text, "")
    except (OSError, ValueError, RecursionError):
        return ""  # `RunDirectory.start` gives the reason
    return text


def _value(config: AnyConfig, section: str, field: str) -> Any:
    """Return a field; None if the configuration has no such field."""
    return config.model_dump().get(section, {}).get(field)


def costs(config: AnyConfig) -> list[str]:
    """Return a line for each setting of a decided configuration that is emulated here."""
    device, lines = run_device(config), []
    for section, field in _DTYPE_FIELDS:
        dtype = _value(config, section, field)
        if dtype is not None and not is_fast(DTYPES[dtype], device):
            lines.append(emulated(f"{section}.{field}", dtype))
    for section, field in _AUTOCAST_FIELDS:
        if _value(config, section, field) and not multiplies_bfloat16(device):
            lines.append(
                f"{section}.{field} = true: {_EMULATED}, and learning takes about 12 times as long "
                "as in float32; use auto"
            )
    return lines


def emulated(name: str, dtype: str) -> str:
    """Return the line about a setting with a dtype that `is_fast` denies."""
    return f"{name} = {dtype}: {_EMULATED}, which takes up to twice as long as float32; use auto"


def inexactness(config: RunConfig) -> list[str]:
    """Return a line if texts of the run can depend on their batch; else none.

    On a GPU no kernel of the CPU engine is built for it.
    """
    if run_device(config).type != "cpu":
        return ["on a GPU a text can depend on its batch at near-ties, hence on drafting"]
    if is_exact(DTYPES[config.rollout.dtype]):
        return []
    return [
        f"rollout.dtype = {config.rollout.dtype}: at near-ties a text can depend on its batch, "
        "hence on drafting (no native kernels: "
        f"{native.unavailable_because() or 'they cannot be built'})"
    ]
