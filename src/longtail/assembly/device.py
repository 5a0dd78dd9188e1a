"""The device of a run. longtail's own engine generates on CPUs; on GPUs vLLM does."""

import torch

from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError
from longtail.system.device import choose_device

AnyConfig = RunConfig | SftConfig | DrafterTrainConfig


def own_engine_device(device: str, field: str) -> torch.device:
    """Return the CPU, where longtail's own engine generates; `auto` is the CPU, too.

    Raises ConfigError, which names the setting `field`, for a GPU.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"{field} = {device!r}: longtail's own engine generates on CPUs; on GPUs vLLM does "
            f"(docs/vllm.md): set rollout.engine = 'vllm' in longtail train, or {field} = 'cpu'"
        )
    return torch.device("cpu")


def run_device(config: AnyConfig) -> torch.device:
    """Return the device on which a run learns and, in `longtail train`, generates.

    Raises ConfigError if it does not exist or cannot generate.
    """
    if isinstance(config, RunConfig) and config.rollout.engine == "own":
        return own_engine_device(config.run.device, "run.device")
    return choose_device(config.run.device)
