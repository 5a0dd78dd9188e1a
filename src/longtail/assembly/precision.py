"""Device and dtypes of a run: what `auto` becomes there, and where a dtype is slow or lossy.

    run.device                         longtail's own engine generates on CPUs; on GPUs vLLM does
    rollout.dtype, target.dtype        bfloat16 where inference in it is fast, else float32
    learner.autocast, train.autocast   on where the hardware multiplies bfloat16 (not in float64)

Inference needs less than training: native kernels widen bfloat16 in registers, so it is fast on
any processor that they are built for.
"""

from pathlib import Path
from typing import Any, TypeVar

import torch

from longtail.config import files
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.model.kernels import native
from longtail.run.checkpoint import CONFIG_FILE, steps_in
from longtail.system.device import DTYPES, choose_device, multiplies_bfloat16, own_engine_device
from longtail.system.files import read_file

AnyConfig = RunConfig | SftConfig | DrafterTrainConfig
Config = TypeVar("Config", RunConfig, SftConfig, DrafterTrainConfig)

_EMULATED = "bfloat16 is emulated on this processor"
_FIELDS = ("rollout.dtype", "target.dtype", "learner.autocast", "train.autocast")
"""Fields that may be `auto`; autocast depends on a dtype."""


def run_device(config: AnyConfig) -> torch.device:
    """Return the device on which a run learns and, in `longtail train`, generates.

    Raises ConfigError if it does not exist or cannot generate.
    """
    if isinstance(config, RunConfig) and config.rollout.engine == "own":
        return own_engine_device(config.run.device, "run.device")
    return choose_device(config.run.device)


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


def decided(config: Config) -> Config:
    """Return the configuration with a value for each `auto`.

    A run that is resumed keeps the values that it was begun with.
    """
    begun = _begun(Path(config.run.dir)) if config.run.resume else ""
    device = run_device(config)
    # vLLM's products on a CPU are batch-invariant in float32 alone.
    in_float32 = _value(config, "rollout.engine") == "vllm" and device.type == "cpu"
    for name in _FIELDS:
        if _value(config, name) != "auto":
            continue
        value, (section, field) = files.lookup(begun, name), name.split(".")
        if field == "dtype" and value not in list(DTYPES):
            value = "float32" if in_float32 else fastest_dtype(device)
        elif field == "autocast" and not isinstance(value, bool):
            given = (_value(config, each) for each in ("learner.dtype", "target.dtype"))
            value = "float64" not in given and multiplies_bfloat16(device)
        changed = getattr(config, section).model_copy(update={field: value})
        config = config.model_copy(update={section: changed})
    return config


def _begun(run_dir: Path) -> str:
    """Return the configuration of the run that a start would resume; empty if there is none."""
    file = run_dir / CONFIG_FILE
    try:
        text = read_file(file).decode() if steps_in(run_dir / "checkpoints") else ""
        files.lookup(text, "")
    except (OSError, ValueError, RecursionError):
        return ""  # `RunDirectory.start` gives the reason
    return text


def _value(config: AnyConfig, name: str) -> Any:
    """Return a field; None if the configuration has no such field."""
    section, field = name.split(".")
    return getattr(getattr(config, section, None), field, None)


def costs(config: AnyConfig) -> list[str]:
    """Return a line for each setting of a decided configuration that is emulated here."""
    device, lines = run_device(config), []
    for name in _FIELDS:
        value = _value(config, name)
        if value is True and not multiplies_bfloat16(device):
            lines.append(
                f"{name} = true: {_EMULATED}, and learning takes about 12 times as long as in "
                "float32; use auto"
            )
        elif value in DTYPES and not is_fast(DTYPES[value], device):
            lines.append(emulated(name, value))
    return lines


def emulated(name: str, dtype: str) -> str:
    """Return the line about a setting with a dtype that `is_fast` denies."""
    return f"{name} = {dtype}: {_EMULATED}, which takes up to twice as long as float32; use auto"


def inexactness(config: RunConfig) -> list[str]:
    """Return a line if texts of the run can depend on their batch, hence on drafting; else none.

    On a GPU no kernel of the CPU engine is built for it.
    """
    if run_device(config).type != "cpu":
        return ["on a GPU a text can depend on its batch at near-ties, hence on drafting"]
    dtype = DTYPES[config.rollout.dtype]
    if dtype == torch.float64 or native.layout(dtype) is not None:
        return []
    return [
        f"rollout.dtype = {config.rollout.dtype}: at near-ties a text can depend on its batch, "
        "hence on drafting (no native kernels: "
        f"{native.unavailable_because() or 'they cannot be built'})"
    ]
